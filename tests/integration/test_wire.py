"""The compiled wire and the Python wire behave the same."""

import contextlib
import json
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from powerband.core.records import OUTCOMES
from powerband.core.workload import Workload
from powerband.load import generator, prompts, python_wire, tokens, wire
from powerband.load.python_wire import Finished
from support.golden import golden

KINDS = [pytest.param(python_wire, id="pure")]
if wire.compiled is not None:
    KINDS.append(pytest.param(wire.compiled, id="compiled"))


def test_the_wire_is_compiled() -> None:
    assert wire.compiled is not None, "this machine has a compiler, so the wire must be compiled"


def request(tokens: int = 8, *, chat: bool = True) -> bytes:
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": "one two three"}]} if chat else {"prompt": "one two three"}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def collect(client: Any, count: int, *, within_s: float = 10) -> list[Finished]:
    found: list[Finished] = []
    deadline = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < deadline:
        found += [Finished(*one) for one in client.collect(0.05)]
    return found


def send_one(kind: Any, port: int) -> Finished:
    client = kind.Wire("127.0.0.1", str(port))
    try:
        client.submit(1, time.monotonic_ns(), request(), -1, 0, False)
        (one,) = collect(client, 1)
        return one
    finally:
        client.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_answers_are_read_with_their_times(kind: Any) -> None:
    with golden(ttft_us=30_000, itl_us=10_000) as server:
        client = kind.Wire("127.0.0.1", str(server.port))
        try:
            due = time.monotonic_ns() + 20_000_000
            for number in range(20):
                client.submit(number, due + number * 5_000_000, request(chat=number % 2 == 0), -1, 0, False)
            found = collect(client, 20)
            assert client.state()["in_flight"] == 0 and client.state()["silent"] == 0
        finally:
            client.close()
    assert sorted(one.id for one in found) == list(range(20))
    for one in found:
        times = array("q", one.times)
        assert (one.status, one.outcome, one.done) == (200, 0, 1)
        assert len(times) == 8 and times[0] == one.first and one.first >= one.sent >= one.due
        assert 25 < (one.first - one.sent) / 1e6 < 500
        assert all(later >= earlier for earlier, later in pairwise(times))
        assert b'"completion_tokens":8' in one.kept and b"engine " not in one.kept


def test_a_chain_sends_its_requests_one_after_another(kind: Any) -> None:
    with golden(ttft_us=10_000, itl_us=1_000) as server:
        client = kind.Wire("127.0.0.1", str(server.port))
        try:
            due = time.monotonic_ns()
            for number in range(12):
                client.submit(number, due, request(4), number % 2, 0, False)
            found = {one.id: one for one in collect(client, 12)}
        finally:
            client.close()
    for number in range(2, 12):
        assert found[number].sent >= found[number - 2].end
        assert found[number].due == found[number - 2].end, "a request is due when the previous one has ended"


def test_several_senders_behave_as_one_wire() -> None:
    with golden(ttft_us=10_000, itl_us=1_000) as server:
        client = wire.connect(wire.Target(server.url, "golden"), senders=3)
        try:
            client.warm(6)
            due = time.monotonic_ns() + 20_000_000
            for number in range(30):
                client.submit(number, due, request(4), number % 5, 0, False)
            found = {one.id: one for one in collect(client, 30)}
            assert client.state()["in_flight"] == 0
        finally:
            client.close()
    assert len(found) == 30 and all(one.done for one in found.values())
    assert all(found[number].sent >= found[number - 5].end for number in range(5, 30)), "a chain stays on one wire"


def test_servers_that_share_the_requests_get_whole_sessions_in_turn() -> None:
    with golden(ttft_us=1_000) as one, golden(ttft_us=30_000) as other:
        client = wire.connect(wire.Target(one.url, "golden", beside=(other.url,)), turns=2)
        try:
            due = time.monotonic_ns() + 20_000_000
            for number in range(16):
                client.submit(number, due, request(1), -1, 0, False)
            found = collect(client, 16)
        finally:
            client.close()
    slow = {answer.id for answer in found if answer.first - answer.sent > 25_000_000}
    assert slow >= {2, 3, 6, 7, 10, 11, 14, 15}


def test_a_limit_delays_requests_and_the_delay_counts(kind: Any) -> None:
    with golden(ttft_us=50_000, itl_us=1_000) as server:
        client = kind.Wire("127.0.0.1", str(server.port), 2)
        try:
            due = time.monotonic_ns()
            for number in range(6):
                client.submit(number, due, request(1), -1, 0, False)
            found = collect(client, 6)
        finally:
            client.close()
        server.end()
        assert server.truth["most_in_flight"] == 2
    assert max(one.first - one.due for one in found) > 140_000_000


def test_stop_cancels_unanswered_requests(kind: Any) -> None:
    with golden(ttft_us=5_000_000) as server:
        client = kind.Wire("127.0.0.1", str(server.port))
        try:
            now = time.monotonic_ns()
            client.submit(1, now, request(), -1, 0, False)
            client.submit(2, now + 60_000_000_000, request(), -1, 0, False)
            client.submit(3, now, request(), 0, 0, False)
            client.submit(4, now, request(), 0, 0, False)
            time.sleep(0.3)
            client.stop()
            found = {one.id: one for one in collect(client, 4)}
        finally:
            client.close()
    assert {one.outcome for one in found.values()} == {python_wire.CANCELLED}
    assert found[1].sent and found[3].sent and not found[2].sent and not found[4].sent


def test_the_end_of_a_run_records_the_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the wire returns its hundred cancelled requests one by one."""
    closed = {"arrivals": {"process": "closed", "users": 2}, "output": {"shape": "fixed", "tokens": 8}}
    workload = Workload.model_validate(closed | {"prompt": {"shape": "fixed", "tokens": 8}})
    traffic = prompts.prepare(workload, 100, vocabulary=tokens.vocabulary(None))
    connect = wire.connect
    monkeypatch.setattr(wire, "connect", lambda *args, **options: OneByOne(connect(*args, **options)))
    with golden(ttft_us=5_000_000) as server:
        target = wire.Target(f"http://127.0.0.1:{server.port}", "golden")
        run = generator.drive(target, traffic, until=lambda progress, _: progress.elapsed_s > 0.2)
    assert sorted(run.records["number"]) == [0, 1] and len(run.unsent_due) == 98
    assert {OUTCOMES[outcome] for outcome in run.records["outcome"]} == {"cancelled"}


class OneByOne:
    """A wire whose `collect` returns one request per call."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.found: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def collect(self, seconds: float) -> list[Any]:
        self.found += self.client.collect(0 if self.found else seconds)
        first, self.found = self.found[:1], self.found[1:]
        return first


def test_whole_keeps_the_full_text(kind: Any) -> None:
    with golden(ttft_us=1_000, itl_us=1_000) as server:
        client = kind.Wire("127.0.0.1", str(server.port))
        try:
            client.submit(1, time.monotonic_ns(), request(4), -1, 0, True)
            (one,) = collect(client, 1)
        finally:
            client.close()
    text = "".join(
        choice["delta"].get("content", "")
        for event in map(json.loads, one.kept.splitlines())
        for choice in event["choices"]
    )
    assert text == "the engine works best "


def test_a_refused_connection(kind: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        one = send_one(kind, probe.getsockname()[1])
    assert one.outcome == python_wire.NOT_CONNECTED


class Scripted:
    """A server that sends given bytes on each connection, piece by piece, and optionally closes it."""

    def __init__(self, *answers: list[bytes], close: bool = True) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.answers, self.close, self.served = list(answers), close, 0
        self.peers: list[socket.socket] = []
        threading.Thread(target=self.run, daemon=True).start()

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.socket, *self.peers):
            one.close()

    def run(self) -> None:
        for pieces in self.answers:
            peer, _ = self.socket.accept()
            self.peers.append(peer)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.recv(65536)
            self.served += 1
            with contextlib.suppress(OSError):  # the client may hang up
                for piece in pieces:
                    peer.sendall(piece)
                    time.sleep(0.005)
            if self.close:
                peer.close()


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


EVENT = b'data: {"choices":[{"delta":{"content":"a \\"content\\": b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):X};x=y\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_fragmentation_of_the_stream_does_not_matter(kind: Any, size: int) -> None:
    stream = HEAD + chunk(EVENT) + chunk(EVENT + USAGE) + b"0\r\nX-Trailer: 1\r\n\r\n"
    with Scripted(list(pieces(stream, size))) as server:
        one = send_one(kind, server.port)
    assert (one.status, one.outcome, one.done, len(one.times) // 8) == (200, 0, 1, 2)
    assert json.loads(one.kept.splitlines()[-1])["usage"] == {"completion_tokens": 2}


@pytest.mark.parametrize(
    ("stream", "outcome", "status", "done"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + EVENT + USAGE, python_wire.ANSWERED, 200, 1),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(EVENT + USAGE) + EVENT + USAGE,
            python_wire.ANSWERED,
            200,
            1,
        ),
        (HEAD + chunk(EVENT), python_wire.BROKEN_OFF, 200, 0),
        (HEAD + chunk(EVENT) + b"0\r\n\r\n", python_wire.ANSWERED, 200, 0),
        (b"HTTP/1.1 503 X\r\nContent-Length: 10\r\n\r\nqueue full", python_wire.ANSWERED, 503, 0),
        (b"", python_wire.BROKEN_OFF, 0, 0),
        (HEAD + b"zz\r\n", python_wire.BROKEN_OFF, 200, 0),
        # hostile: sizes that overflow, negative and missing sizes, NUL bytes, other protocols
        (HEAD + b"FFFFFFFFFFFFFFFF\r\nabcdef", python_wire.BROKEN_OFF, 200, 0),
        (HEAD + b"1FFFFFFFFFFFFFFFF\r\nabcdef", python_wire.BROKEN_OFF, 200, 0),
        (HEAD + b"-5\r\nabcdef", python_wire.BROKEN_OFF, 200, 0),
        (HEAD + b"\r\nabcdef", python_wire.BROKEN_OFF, 200, 0),
        (HEAD + b"3\r\nabcdef\r\n0\r\n\r\n", python_wire.BROKEN_OFF, 200, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc", python_wire.BROKEN_OFF, 200, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\nabc", python_wire.BROKEN_OFF, 200, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", python_wire.BROKEN_OFF, 200, 0),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: \0abcdefg\r\n\r\nabc", python_wire.BROKEN_OFF, 0, 0),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", python_wire.BROKEN_OFF, 0, 0),
        (b"HTTP/1.1 \r\n\r\n", python_wire.BROKEN_OFF, 0, 0),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", python_wire.BROKEN_OFF, 0, 0),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000 + b"\r\n\r\n", python_wire.BROKEN_OFF, 0, 0),
    ],
)
def test_malformed_and_error_responses(kind: Any, stream: bytes, outcome: int, status: int, done: int) -> None:
    with Scripted([stream]) as server:
        one = send_one(kind, server.port)
    assert (one.outcome, one.status, one.done) == (outcome, status, done)
    if status == 503:
        assert b"queue full" in one.kept


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"x" * (9 << 20), id="a line without end"),
        pytest.param(b'data: {"usage": "' + b"x" * (7 << 20) + b'"}\n', id="lines to keep"),
    ],
)
def test_a_response_without_end_is_broken_off(kind: Any, body: bytes) -> None:
    with Scripted([b"HTTP/1.1 200 OK\r\n\r\n", *[body] * 20]) as server:
        one = send_one(kind, server.port)
    assert one.outcome == python_wire.BROKEN_OFF
    assert len(one.kept) < 65 << 20 and one.received < 85 << 20


def test_a_request_on_a_closed_idle_connection_is_resent(kind: Any) -> None:
    good = HEAD + chunk(EVENT) + chunk(USAGE) + b"0\r\n\r\n"
    with Scripted([good], [good]) as server:  # the server closes each connection after its response
        client = kind.Wire("127.0.0.1", str(server.port))
        try:
            for number in range(2):
                client.submit(number, time.monotonic_ns(), request(), -1, 0, False)
                (one,) = collect(client, 1)
                assert one.outcome == python_wire.ANSWERED and one.done
        finally:
            client.close()
        assert server.served == 2
