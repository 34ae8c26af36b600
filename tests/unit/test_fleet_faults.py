"""Faults of disks, files and connections that must not end a fleet, a slot or its picker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerband.errors import InputError
from powerband.runtime import local_page, ports
from powerband.runtime.descriptor_store import DescriptorStore, StoredDescriptors
from powerband.serve import control_channel
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


def test_a_host_name_becomes_an_address() -> None:
    assert ports.resolve("localhost") == "127.0.0.1" and ports.resolve("::1") == "::1"
    with pytest.raises(InputError, match="not an address"):
        ports.resolve("no-such-host.invalid")


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


async def test_room_is_made_once_for_each_start_that_found_none(
    found: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that began before the devices were free, and takes long to fail, must not cost a second replica."""
    retired: list[str] = []

    async def retire(slot: ReplicaSlot) -> None:
        retired.append(slot.name)

    monkeypatch.setattr(found, "retire", retire)
    slots(found, 3)
    new = model_spec()
    slot = ReplicaSlot("m-new", "m", new, found.folder, on_ray=False, on_change=lambda: None)
    found.slots[slot.name], slot.no_room = slot, True
    now = time.monotonic()
    for freed_s, tried_s, expected in ((-60.0, -1.0, 1), (-10.0, -11.0, 1), (-10.0, -9.0, 1), (-10.0, -5.0, 2)):
        found.freed_at, slot.tried_at = now + freed_s, now + tried_s
        found.rollouts.make_room("m", new)
        await asyncio.sleep(0)
        assert len(retired) == expected, (freed_s, tried_s)
