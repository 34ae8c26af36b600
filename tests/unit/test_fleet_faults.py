"""Faults of disks, files and connections that must not end a fleet, a slot or its picker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from powerband.core.engine import Command
from powerband.errors import EngineFailed, InputError
from powerband.runtime import local_page, ports
from powerband.runtime.descriptor_store import DescriptorStore, StoredDescriptors
from powerband.runtime.process import Process
from powerband.serve import control_channel, relay
from powerband.serve.control import local_replica, supervisor
from powerband.serve.control.replica_slot import ReplicaSlot
from powerband.serve.control.supervisor import Supervisor
from powerband.serve.router.admission import Admission, hash_key, load_tenants
from powerband.serve.router.capture import TrafficCapture, next_id, rotated
from powerband.serve.router.pool import Endpoint, QueuedRequest, RequestProfile
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.spec import FleetSpec, ModelSpec
from powerband.store import runs

TENANTS = "powerband: tenants/1\ntenants:\n  {name}: {{key_sha256: {digest}}}\n"


def model_spec(name: str = "m") -> ModelSpec:
    return ModelSpec(name=name, data={}, recipe="r", replicas=1, in_flight=1, queue_timeout_s=1.0)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Supervisor]:
    FleetSpec(models={"m": model_spec()}, host="127.0.0.1", port=1, admin_port=2, redirector_port=3).write(tmp_path)
    with DescriptorStore().connect() as connection:
        yield Supervisor(tmp_path, StoredDescriptors(connection))


def slots(found: Supervisor, count: int) -> None:
    """Add slots with an address, as of ready replicas."""

    class Ready:
        address, engine_url, pid, gpus = "127.0.0.1:40000", "http://127.0.0.1:40000", 1, ()

    for number in range(count):
        slot = ReplicaSlot(f"m-{number}", "m", model_spec(), found.folder, on_ray=False, on_change=lambda: None)
        slot.replica = Ready()  # type: ignore[assignment]
        found.slots[slot.name] = slot


async def test_the_picker_gets_the_whole_state_of_2000_replicas_and_again_on_a_new_connection(
    found: Supervisor, tmp_path: Path
) -> None:
    """Asyncio's lines end at 64 KiB; and a connection that ends must not be the last one."""
    slots(found, 2000)
    found._reachable = {found.slots["m-0"].address or ""}
    states: list[dict[str, Any]] = []
    both = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state = await control_channel.receive(reader)
        assert state is not None
        states.append(state)
        if len(states) == 2:
            control_channel.send(writer, {"done": 7, "padding": "x" * 2**20})
            await writer.drain()
            both.set()
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(serve, tmp_path / "control.sock"):
        exchange = asyncio.create_task(found.picker.run())
        await asyncio.wait_for(both.wait(), 20)
        while found.picker.report.get("done") != 7:
            await asyncio.sleep(0.01)
        exchange.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await exchange
        await asyncio.sleep(0.1)  # the server closes its side
    assert [len(one["endpoints"]["m"]) for one in states] == [2000, 2000]


async def test_a_full_disk_does_not_end_the_supervisor(
    found: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full(path: Path, _: str) -> None:
        written.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_atomic", full)
    monkeypatch.setattr(supervisor, "_RETRY_WRITE_S", 0.01)
    slots(found, 1)
    found._write_status()
    assert found.status()["problems"] == ["cannot write status.json: No space left on device"]
    found.changed.set()
    publishing = asyncio.create_task(found._publish_changes())
    while len(written) < 4:
        await asyncio.sleep(0.01)
    assert not publishing.done(), "it writes the endpoints again until the disk has room"
    monkeypatch.undo()
    monkeypatch.setattr(supervisor, "_ENVOY_RELOAD_TIMEOUT_S", 0.0)
    while not found._reachable:
        await asyncio.sleep(0.05)
    found._write_status()
    assert found.status()["problems"] == []
    publishing.cancel()


async def test_a_slot_starts_again_after_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = 0

    def run_replica(*_: Any, **__: Any) -> None:
        nonlocal starts
        starts += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = ModelSpec(name="m", data={"engine": "fake", "variant": {"source": "x"}}, recipe="r", replicas=1, in_flight=1,
                     queue_timeout_s=1.0)  # fmt: skip
    monkeypatch.setattr(local_replica, "run_replica", run_replica)
    slot = ReplicaSlot("m-1", "m", spec, tmp_path, on_ray=False, on_change=lambda: None)
    running = asyncio.create_task(slot.run())
    while starts < 3:
        assert not running.done()
        await asyncio.sleep(0.02)
    assert "No space left" in slot.status()["problem"]
    await asyncio.wait_for(slot.stop(), 5)
    await running


def test_an_invalid_tenants_file_closes_at_start_and_is_reported_at_reload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, admission = tmp_path / "tenants.yaml", Admission(None)
    file.write_text("powerband: tenants/1\ntenants:\n  a: {key_sha: 1}\n")
    admission.close()
    load_tenants(admission, file)
    with pytest.raises(RequestRejected, match="unknown API key"):
        admission.authenticate("Bearer pb-a")
    file.write_text(TENANTS.format(name="a", digest=hash_key("pb-a")))
    load_tenants(admission, file)
    assert admission.authenticate("Bearer pb-a") == "a" and not admission.problem
    for bad in ("powerband: tenants/1\ntenants: {", ""):
        file.write_text(bad)
        load_tenants(admission, file)
        assert admission.authenticate("Bearer pb-a") == "a" and str(file) in admission.problem
    file.unlink()
    load_tenants(admission, file)
    assert admission.authenticate("Bearer pb-a") == "a"
    assert "tenants file not loaded" in capsys.readouterr().err
    scheduler, telemetry = RequestScheduler({"m": model_spec()}), Telemetry()
    scheduler.admission = admission
    assert b"powerband_tenants_file_invalid 1.0" in telemetry.exposition(scheduler)
    assert "tenants file not loaded" in telemetry.summary(scheduler)["problems"][0]


def finished(*blocks: int) -> RequestContext:
    """Return a request with these prefix blocks that a replica has answered."""
    profile = RequestProfile(100.0, 10.0, fine_blocks=blocks)
    queued = QueuedRequest(1, profile, arrived_s=0.0)
    queued.endpoint = Endpoint("a", "a:1", 1)
    context = RequestContext.__new__(RequestContext)
    context.queued, context.model = queued, model_spec()
    return context


def test_the_capture_is_bounded_and_keeps_one_older_file(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    capture = TrafficCapture(path, max_bytes=2000)
    for number in range(40):
        capture.add(finished(1, 2, 100 + number), RequestOutcome(200, output_tokens=5))
    assert capture.rotations > 2 and not capture.lost
    assert path.stat().st_size < 2500 and rotated(path).stat().st_size < 2500
    assert next_id(path) == capture._first_id + len(capture._ids) > 40
    assert {one.name for one in tmp_path.iterdir()} == {"traffic.jsonl", "traffic.jsonl.1"}
    capture.close()


def test_a_full_disk_loses_captured_requests_and_counts_them(tmp_path: Path) -> None:
    capture = TrafficCapture(tmp_path / "traffic.jsonl")
    capture.close()
    capture._stream = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    capture.add(finished(1), RequestOutcome(200, output_tokens=5))
    assert capture.lost == 1
    capture.add(finished(1), RequestOutcome(200, output_tokens=5))
    assert capture.lost == 1 and next_id(capture.path) == 1
    capture.close()


def test_a_relay_without_free_files_waits_instead_of_spinning() -> None:
    """A listener stays readable while no file is free: without a pause the relay takes a whole core."""
    with socket.create_server(("127.0.0.1", 0)) as engine, ports.reserve("127.0.0.1") as reserved:
        command = relay.command("127.0.0.1", reserved.number, engine.getsockname()[1])

        def few_files() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

        process = subprocess.Popen(command.argv, preexec_fn=few_files)
        try:
            clients = [connected(reserved.number)]
            clients += [connected(reserved.number) for _ in range(40)]
            used = psutil.Process(process.pid)
            time.sleep(0.5)
            before = sum(used.cpu_times()[:2])
            time.sleep(1.5)
            assert sum(used.cpu_times()[:2]) - before < 0.3
            for one in clients:
                one.close()
            time.sleep(0.5)
            engine.settimeout(10)
            with connected(reserved.number) as again:
                again.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                while True:  # the connections of the closed clients come first
                    accepted, _ = engine.accept()
                    with accepted:
                        if accepted.recv(100).startswith(b"GET"):
                            break
        finally:
            process.kill()
            process.wait()


def connected(port: int) -> socket.socket:
    """Connect to a relay, which may be starting."""
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


async def test_a_relay_that_cannot_listen_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.close()
        command = relay.command("192.0.2.1", port, 1)  # an address of no machine
        async with Process(command, log=tmp_path / "relay.log") as process:
            with pytest.raises(EngineFailed, match="cannot listen"):
                await asyncio.wait_for(local_replica._wait_listening("127.0.0.1", port, process), 20)


def test_a_host_name_becomes_an_address() -> None:
    assert ports.resolve("localhost") == "127.0.0.1" and ports.resolve("::1") == "::1"
    with pytest.raises(InputError, match="not an address"):
        ports.resolve("no-such-host.invalid")


EngineEnd = Callable[[socket.socket, int], None]  # called with the engine's connection and the relay's process id


def relayed(engine: socket.socket | None, act: EngineEnd, *, secret: str = "", header: str = "") -> bytes:
    """Return the relay's response to a request while its engine does something; None: the port of no engine."""
    with ports.reserve("127.0.0.1") as listening, ports.reserve("127.0.0.1") as closed:
        engine_port = engine.getsockname()[1] if engine else closed.number
        command = relay.command("127.0.0.1", listening.number, engine_port, secret)
    process = subprocess.Popen(command.argv, env={**os.environ, **command.env})
    try:
        with connected(listening.number) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{header}content-length: 2\r\n\r\n{{}}"
            client.sendall(head.encode())
            if engine:
                accepted, _ = engine.accept()
                with accepted:
                    if accepted.recv(1000):
                        act(accepted, process.pid)
            parts = []
            while part := client.recv(1000):
                parts.append(part)
            return b"".join(parts)
    finally:
        process.kill()
        process.wait()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def close(engine: socket.socket, _: int) -> None:
    """End without a response."""


def close_after_headers(engine: socket.socket, _: int) -> None:
    """End with headers and no body."""
    engine.sendall(HEAD)
    time.sleep(0.1)


def hang(_: socket.socket, relay_pid: int) -> None:
    """Let the relay know that the engine hangs."""
    relay.redirect_waiting(relay_pid)
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("act", "path"),
    [(close, "died"), (close_after_headers, "died"), (hang, "unavailable"), (None, "unavailable")],
    ids=["no response", "only headers", "hangs", "not listening"],
)
def test_a_relay_redirects_a_request_whose_engine_failed(act: EngineEnd | None, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        found = relayed(engine if act else None, act or close)
    assert found.startswith(b"HTTP/1.1 307") and f"location: http://picker/{path}\r\n".encode() in found


def test_a_relay_ends_a_stream_that_has_begun_with_an_error_event() -> None:
    def act(one: socket.socket, _: int) -> None:
        one.sendall(HEAD + b"6\r\ndata: \r\n")
        time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as engine:
        found = relayed(engine, act)
    assert found.startswith(b"HTTP/1.1 200") and b"replica_died" in found
    assert found.endswith(b"0\r\nx-powerband-usage: pieces=0 prompt=0 output=0 broken=1\r\n\r\n")


USAGE = b'{"usage": {"prompt_tokens": 12, "total_tokens": 46, "completion_tokens": 34}}'


def respond(engine: socket.socket, _: int) -> None:
    """Send a whole response, in two parts."""
    engine.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(USAGE) + USAGE[:20])
    time.sleep(0.1)
    engine.sendall(USAGE[20:])
    time.sleep(0.1)


def stream(engine: socket.socket, _: int) -> None:
    """Stream three events, one of them split, and the usage."""
    engine.sendall(HEAD)
    for part in (b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\ndata: {"a": 3}\n\n', b"data: " + USAGE + b"\n\n"):
        framed = b"%x\r\n%s\r\n" % (len(part), part)
        engine.sendall(framed[:7])
        time.sleep(0.05)
        engine.sendall(framed[7:])
    engine.sendall(b"0\r\n\r\n")
    time.sleep(0.1)


def test_a_relay_counts_what_envoy_reports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        whole, streamed = relayed(engine, respond), relayed(engine, stream)
    head, _, body = whole.partition(b"\r\n\r\n")
    assert body == USAGE and b"\r\nx-powerband-usage: pieces=0 prompt=12 output=34 broken=0" in head
    assert streamed.endswith(b"0\r\nx-powerband-usage: pieces=4 prompt=12 output=34 broken=0\r\n\r\n")


def test_a_relay_with_a_secret_refuses_requests_without_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        for header in ("", "x-powerband-secret: other\r\n", "x-powerband-secret: hiddenX\r\n"):
            assert relayed(engine, respond, secret="hidden", header=header) == b""
        found = relayed(engine, respond, secret="hidden", header="x-powerband-secret: hidden\r\n")
    assert found.endswith(USAGE)


def test_stored_descriptors_outlive_the_process_that_opened_them() -> None:
    store, (ours, theirs) = DescriptorStore(), socket.socketpair()
    with store.connect() as connection, theirs:
        outlives(store, StoredDescriptors(connection), ours, theirs)


def outlives(store: DescriptorStore, first: StoredDescriptors, ours: socket.socket, theirs: socket.socket) -> None:
    """Keep, drop and take copies of a socket; the other end sees it close with the store."""
    first.keep("a", {"number": 1}, ours.fileno())
    first.keep("b", {}, ours.fileno())
    first.keep("a", {"number": 2}, ours.fileno())
    first.drop("b")
    copies = first.all()
    assert {key: record for key, (record, _) in copies.items()} == {"a": {"number": 2}}
    os.close(copies["a"][1])
    ours.close()
    with store.connect() as connection:
        kept = StoredDescriptors(connection).all()["a"][1]
    with socket.socket(fileno=kept) as again:
        again.sendall(b"still open")
        assert theirs.recv(100) == b"still open"
    store.close()
    theirs.settimeout(5)
    assert theirs.recv(100) == b""


async def test_a_process_is_adopted_with_its_exit_status(tmp_path: Path) -> None:
    command = Command(argv=("sh", "-c", "sleep 0.5; exit 7"))
    async with Process(command, log=tmp_path / "log") as process:
        adopted = await Process.adopt(process.record, os.dup(process.control))
        assert adopted.pid == process.pid
        process._watcher.cancel()  # as if its supervisor had died
        await asyncio.wait_for(adopted.exited.wait(), 10)
        assert adopted.exit_code == 7
        process._watcher = adopted._watcher
        await adopted._close()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na 1", "a 1"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\na 1\r\n0\r\n\r\n", "a 1"),
        (b"HTTP/1.0 200 OK\r\n\r\na 1", "a 1"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", ""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\na 1", None),
        (b"", None),
    ],
)
async def test_a_page_is_read_whole_or_not_at_all(answer: bytes, found: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"GET /metrics " in await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if b"content-length: 3" in answer:  # the length ends it, not the connection
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reading = asyncio.wait_for(local_page.read("127.0.0.1", port, "/metrics"), 10)
        if found is None:
            with pytest.raises(ConnectionError):
                await reading
        else:
            assert await reading == found
