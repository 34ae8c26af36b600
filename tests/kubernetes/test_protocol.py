"""The endpoint picker protocol through a real Envoy that is configured as gateways are."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("grpc")

from google.protobuf import struct_pb2

from powerband.serve import envoy
from powerband.serve.router import admission
from support import gateways, pickers
from support.golden import Golden, free_port, golden
from support.pickers import NOT_SERVING, SERVING, PickerProcess

CHAT = {"model": "golden", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}
PATH = "/v1/chat/completions"


@dataclass
class Setup:
    """A gateway, its picker and two model servers; `dead` is an address at which nothing listens."""

    http: httpx.Client
    picker: PickerProcess
    servers: list[Golden]
    dead: str

    def ask(self, **headers: str) -> httpx.Response:
        return self.http.post(PATH, json=CHAT, headers=headers)

    def served(self) -> list[int]:
        """End the servers; return how many answers each has given."""
        for one in self.servers:
            one.end()
        return [len(one.requests()) for one in self.servers]


@contextlib.contextmanager
def setup(
    folder: Path, *args: str, listed: tuple[str, ...] = ("0", "1"), in_flight: int = 8, **options: Any
) -> Iterator[Setup]:
    """Run everything; `listed` are the endpoints of the file: numbers of servers, or `dead`."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(golden(ttft_us=5000, itl_us=1000, loopback=2 + n)) for n in range(2)]
        dead = f"127.0.0.9:{free_port()}"
        known = {"0": servers[0].address, "1": servers[1].address, "dead": dead}
        file = folder / "endpoints.yaml"
        file.write_text("".join(f"- {known[one]}\n" for one in listed))
        recipe = pickers.write_recipe(folder, in_flight=in_flight)
        ready = options.pop("ready", True)
        picker = stack.enter_context(
            pickers.picker("--endpoints", str(file), "--notice", "0.2s", *args, recipes=[recipe], ready=ready)
        )
        others = [f"127.0.1.{n}:{dead.rpartition(':')[2]}" for n in range(1, 201)]  # what the gateway takes without us
        url = stack.enter_context(gateways.gateway(folder, picker.address, [*known.values(), *others], **options))
        http = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=30))
        yield Setup(http, picker, servers, dead)


def listed_hint(*addresses: object) -> dict[str, str]:
    """Return the header that becomes a subset hint with a list."""
    value = struct_pb2.Value()
    value.list_value.SetInParent()  # an empty list is a list
    value.list_value.extend(addresses)
    return {gateways.SUBSET_LIST: base64.b64encode(value.SerializeToString()).decode()}


def test_bodies_stream_in_both_directions(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        for size in (10, 60_000, 300_000):
            body = {**CHAT, "messages": [{"role": "user", "content": "x" * size}]}
            found = one.http.post(PATH, json=body | {"stream": True})
            assert found.status_code == 200, found.text
            assert '"completion_tokens":3' in found.text
        with one.http.stream("POST", PATH, json={**CHAT, "stream": True, "max_tokens": 20}) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]" and len(events) >= 20
        assert sum(one.served()) == 4
        assert one.picker.metric('powerband_output_tokens_total{model="golden"}') == 29


@pytest.mark.parametrize("from_metadata", [False, True])
def test_header_and_metadata_name_the_same_endpoint(tmp_path: Path, from_metadata: bool) -> None:
    with setup(tmp_path, listed=("1",), from_metadata=from_metadata) as one:
        assert all(one.ask(stream="yes").status_code == 200 for _ in range(4))
        found = one.http.post(PATH, json={**CHAT, "stream": True}, headers={envoy.DESTINATION: one.servers[0].address})
        assert found.status_code == 200 and found.headers[envoy.REPLICA] == one.servers[1].address
        assert one.served() == [0, 1]


def test_a_subset_hint_limits_the_choice(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        first, second = (server.address for server in one.servers)
        for hint in (
            listed_hint(second),
            {gateways.SUBSET_TEXT: second},
            {gateways.SUBSET_TEXT: f"{second} , 1.2.3.4:5"},
        ):
            assert {one.ask(**hint).headers[envoy.REPLICA] for _ in range(3)} == {second}
        with contextlib.ExitStack() as stack:
            body, hint = {**CHAT, "stream": True, "max_tokens": 500}, listed_hint(first, second)
            streams = [stack.enter_context(one.http.stream("POST", PATH, json=body, headers=hint)) for _ in range(2)]
            assert {stream.headers[envoy.REPLICA] for stream in streams} == {first, second}


def test_a_subset_without_a_ready_endpoint_is_503(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        struct = struct_pb2.Value()
        struct.struct_value.fields["a"].number_value = 1
        malformed = {gateways.SUBSET_LIST: base64.b64encode(struct.SerializeToString()).decode()}
        empty_text = {gateways.SUBSET_TEXT: ","}
        for hint in (listed_hint(), listed_hint("1.2.3.4:5"), listed_hint(one.dead, 7, True), malformed, empty_text):
            found = one.ask(**hint)
            assert found.status_code == 503 and found.json()["error"]["code"] == "no_replica", hint
            assert one.http.get("/v1/other", headers=hint).status_code == 503
        assert one.served() == [0, 0]


def test_without_a_ready_endpoint_the_answer_is_503(tmp_path: Path) -> None:
    with setup(tmp_path, listed=("dead",), ready=False) as one:
        found = one.ask()
        assert found.status_code == 503 and found.headers["retry-after"]
        assert [one.picker.health(name) for name in ("liveness", "readiness", "")] == [
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
        ]


def test_a_request_without_capacity_is_429(tmp_path: Path) -> None:
    with setup(tmp_path, in_flight=1) as one, contextlib.ExitStack() as stack:
        for _ in range(2):  # one on each server, for 2 s
            body = {**CHAT, "stream": True, "max_tokens": 2000}
            assert stack.enter_context(one.http.stream("POST", PATH, json=body)).status_code == 200
        began = time.monotonic()
        found = one.ask()
        assert found.status_code == 429 and int(found.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 1.0


def test_a_fallback_serves_and_is_accounted_for(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        first, second = (server.address for server in one.servers)
        one.servers[0].end()  # probes notice it only after a second
        body = {**CHAT, "stream": True, "max_tokens": 2000}
        with one.http.stream("POST", PATH, json=body) as answer:
            assert answer.status_code == 200
            running = {
                a: one.picker.metric(f'powerband_running{{model="golden",replica="{a}"}}') for a in (first, second)
            }
            assert running[second] == 1 and not running[first], running
            assert answer.headers[envoy.REPLICA] == second
            assert "data: [DONE]" in answer.read().decode()


def test_health_is_told_by_service(tmp_path: Path) -> None:
    import grpc

    with setup(tmp_path) as one:
        for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert one.picker.health(name) == SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            one.picker.health("other")


def test_the_conformance_header_is_obeyed_only_if_asked_for(tmp_path: Path) -> None:
    for args in ((), ("--conformance-header",)):
        folder = tmp_path / str(len(args))
        folder.mkdir()
        with setup(folder, *args) as one:
            first, second = (server.address for server in one.servers)
            wanted = {"test-epp-endpoint-selection": f"{second.partition(':')[0]}, {first}"}
            answers = [one.http.post("/any/path", content=b"not json", headers=wanted) for _ in range(4)]
            assert all(found.status_code == 200 for found in answers)
            served = {found.headers.get("x-conformance-test-served-endpoint") for found in answers}
            assert served == ({second} if args else {None})


def test_without_a_picker_the_gateway_fails_the_request(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        one.picker.process.kill()
        one.picker.process.wait()
        assert one.ask().status_code == 500


def test_bad_requests_reach_no_server_and_other_paths_do(tmp_path: Path) -> None:
    with setup(tmp_path) as one:
        assert one.http.post(PATH, content=b"{").status_code == 400
        assert one.http.post(PATH, json={**CHAT, "model": "unknown"}).status_code == 404
        assert one.http.get(PATH).status_code == 405
        assert one.http.get("/v1/models").json()["data"][0]["id"] == "golden"
        assert one.http.get("/health").json() == {"status": "ok"}  # of a server
        assert one.http.request("POST", "/tokenize", content=b"").status_code == 200
        assert one.served() == [0, 0]


def test_a_picker_that_ends_drains_its_queue(tmp_path: Path) -> None:
    with setup(tmp_path, in_flight=1) as one, contextlib.ExitStack() as stack:
        body = {**CHAT, "stream": True, "max_tokens": 100}
        slow = {"x-powerband-patience-s": "20"}
        streams = [
            stack.enter_context(one.http.stream("POST", PATH, json={**body, "max_tokens": 1500})) for _ in range(2)
        ]
        import threading

        queued: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: queued.append(one.http.post(PATH, json=body, headers=slow)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while one.picker.metric('powerband_queue_depth{model="golden"}') != 4:
            time.sleep(0.02)
        one.picker.terminate()
        assert all("data: [DONE]" in stream.read().decode() for stream in streams)
        for thread in threads:
            thread.join()
        assert [found.status_code for found in queued] == [200] * 4
        assert one.picker.process.wait(timeout=10) == 0


def test_tenants_and_recipes_are_read_again(tmp_path: Path) -> None:
    key, digest = admission.new_key()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"powerband: tenants/1\ntenants:\n  a: {{key_sha256: {digest}}}\n")
    with setup(tmp_path, "--tenants", str(tenants)) as one, contextlib.ExitStack() as stack:
        own = {"authorization": f"Bearer {key}"}
        assert one.ask().status_code == 401 and one.http.get("/v1/models").status_code == 401
        assert one.ask(**own).status_code == 200 and one.http.get("/v1/models", headers=own).status_code == 200
        body = {**CHAT, "stream": True, "max_tokens": 4000}
        for _ in range(2):
            assert stack.enter_context(one.http.stream("POST", PATH, json=body, headers=own)).status_code == 200
        assert one.ask(**own).status_code == 200
        pickers.write_recipe(tmp_path, in_flight=1)
        tenants.write_text("not a document")  # an invalid file changes nothing
        time.sleep(1.5)
        assert one.ask(**own).status_code == 429, "both replicas have the one request that the new recipe allows"
