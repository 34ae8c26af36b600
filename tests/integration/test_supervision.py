"""Supervision of real processes, with the golden server: latencies, failures, and no process left behind."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.core.engine import Command
from powerband.errors import EngineFailed, InputError
from powerband.launchers import local
from powerband.runtime import ports
from powerband.runtime.process import Process
from powerband.runtime.replica import Replica


def fake(**config: Any) -> Deployment[Any]:
    data = {"variant": {"source": "golden"}, "engine": "fake", "config": config}
    return engines.deployment_type("fake").model_validate(data)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *, ready_timeout_s: float = 20, stop_grace_s: float = 1, **config: Any
) -> AsyncIterator[Replica]:
    prepared = local.prepare(fake(**config))
    async with local.launch(
        prepared, directory=tmp_path, ready_timeout_s=ready_timeout_s, stop_grace_s=stop_grace_s
    ) as replica:
        yield replica


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return trial.connect_ex(("127.0.0.1", port)) != 0


def mentioning(text: str) -> list[int]:
    """Return the processes whose command line contains the text."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(text in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process.pid)
    return found


async def test_a_replica_is_ready_inside_the_context_and_stopped_after_it(tmp_path: Path) -> None:
    async with running(tmp_path) as replica:
        assert replica.state == "ready"
        assert replica.process is not None and replica.process.pid is not None and replica.port is not None
        pid, port = replica.process.pid, replica.port
        assert replica.process.memory_bytes() > 2**20
        assert [timing.phase for timing in replica.timings][-2:] == ["listening", "first answer"]
    assert str(replica.state) == "stopped"
    assert not alive(pid) and free(port)
    states = [json.loads(line)["state"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert states == ["starting", "answering", "ready", "stopping", "stopped"]
    assert "listening" in (tmp_path / "engine.log").read_text()
    assert str(port) in (tmp_path / "command.sh").read_text()


@pytest.mark.quiet
async def test_the_golden_server_keeps_its_schedule(tmp_path: Path) -> None:
    """First token after 50 ms, then one every 20 ms; medians within 15 ms and 5 ms on a shared machine."""
    firsts, gaps = [], []
    async with running(tmp_path, ttft_s="50ms", itl_s="20ms") as replica, httpx.AsyncClient() as client:
        for _ in range(7):
            stamps = []
            body = {"model": "golden", "prompt": "a b c", "max_tokens": 8, "stream": True}
            began = time.monotonic()
            async with client.stream("POST", f"{replica.url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        stamps.append(time.monotonic())
            assert len(stamps) == 8
            firsts.append(stamps[0] - began)
            gaps += [b - a for a, b in itertools.pairwise(stamps)]
    assert 0.05 <= sorted(firsts)[3] < 0.065
    assert abs(sorted(gaps)[len(gaps) // 2] - 0.02) < 0.005


async def test_gauges_count_requests_and_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=2, max_num_queued_reqs=3, itl_s="50ms") as replica:
        before = await replica.gauges()
        async with httpx.AsyncClient() as client:
            body = {"prompt": "one two three", "max_tokens": 10}
            work = [
                asyncio.create_task(client.post(f"{replica.url}/v1/completions", json=body, timeout=30))
                for _ in range(5)
            ]
            await asyncio.sleep(0.25)
            during = await replica.gauges()
            codes = sorted([(await one).status_code for one in work])
        after = await replica.gauges()
    assert codes == [200, 200, 200, 503, 503]
    assert (during.running, during.queue_depth) == (2, 1)
    assert after.output_tokens is not None and before.output_tokens is not None
    assert after.output_tokens - before.output_tokens == 30
    assert after.refused_requests == 2
    assert (after.running, after.queue_depth) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "failure", "message"),
    [
        ("never_ready", "never_ready", "was not ready after 1 s"),
        ("dies_on_first_request", "died_on_first_request", "crashed on its first request"),
        ("out_of_memory", "out_of_memory", "ran out of memory"),
        ("crashes", "crashed", "crashed during startup"),
    ],
)
async def test_a_fault_becomes_a_typed_failure(tmp_path: Path, fault: str, failure: str, message: str) -> None:
    timeout = 1 if fault == "never_ready" else 20
    with pytest.raises(EngineFailed) as caught:
        async with running(tmp_path, fault=fault, ready_timeout_s=timeout):
            pytest.fail("it must not become ready")
    assert caught.value.failure == failure
    assert message in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 3
    assert not mentioning(str(tmp_path))


async def test_an_exit_while_serving_raises(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="killed with SIGKILL"):
        async with running(tmp_path) as replica:
            assert replica.process is not None and replica.process.pid is not None
            os.kill(replica.process.pid, signal.SIGKILL)
            await asyncio.wait_for(replica.watch(), 5)


async def test_an_engine_that_ignores_term_is_killed_at_the_deadline(tmp_path: Path) -> None:
    async with running(tmp_path, fault="ignores_term", stop_grace_s=0.5) as replica:
        assert replica.process is not None and replica.process.pid is not None
        pid = replica.process.pid
        began = time.monotonic()
    assert 0.4 < time.monotonic() - began < 3
    assert not alive(pid)


async def test_a_child_in_another_session_is_found_and_killed(tmp_path: Path) -> None:
    async with running(tmp_path, fault="leaves_child") as replica:
        assert replica.process is not None
        children = psutil.Process(replica.process.pid).children(recursive=True)
        assert len(children) == 1
    assert not alive(children[0].pid)


async def test_when_the_keeper_is_killed_the_engine_is_killed_too(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed):
        async with running(tmp_path, fault="leaves_child") as replica:
            assert replica.process is not None and replica.process.pid is not None
            engine = psutil.Process(replica.process.pid)
            keeper, children = engine.parent(), engine.children(recursive=True)
            scratch = Path(engine.environ()["TMPDIR"])
            assert scratch.exists()
            assert keeper is not None and len(children) == 1
            keeper.kill()
            await asyncio.wait_for(replica.watch(), 5)
    assert not alive(engine.pid) and not alive(children[0].pid)
    assert not scratch.exists()


async def test_shared_memory_of_a_killed_engine_is_removed(tmp_path: Path) -> None:
    script = """
from multiprocessing import resource_tracker, shared_memory
import time
block = shared_memory.SharedMemory(create=True, size=4096, name="powerband-test-block")
resource_tracker.unregister(block._name, "shared_memory")
print("made", flush=True)
time.sleep(600)
"""
    log = tmp_path / "log"
    async with Process(Command(argv=(sys.executable, "-c", script)), log=log, grace_s=0.2):
        while "made" not in (log.read_text() if log.exists() else ""):
            await asyncio.sleep(0.02)
        assert Path("/dev/shm/powerband-test-block").exists()
    assert not Path("/dev/shm/powerband-test-block").exists()


async def test_temporary_files_are_removed_with_the_engine(tmp_path: Path) -> None:
    script = "import tempfile, time; print(tempfile.mkstemp()[1], flush=True); time.sleep(600)"
    log = tmp_path / "log"
    async with Process(Command(argv=(sys.executable, "-c", script)), log=log, grace_s=0.2):
        while not (log.exists() and log.read_text().endswith("\n")):
            await asyncio.sleep(0.02)
        made = Path(log.read_text().strip())
        assert made.exists()
    assert not made.exists() and not made.parent.exists()


async def test_the_compile_cache_outlives_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path / "cache"))
    async with running(tmp_path) as replica:
        assert replica.process is not None and replica.process.pid is not None
        env = psutil.Process(replica.process.pid).environ()
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    assert not env["TORCHINDUCTOR_CACHE_DIR"].startswith(env["TMPDIR"])


async def test_the_size_of_a_log_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerband.runtime.process.LOG_MAX_BYTES", 10_000)
    log = tmp_path / "log"
    script = "for i in range(20000): print('line', i)"
    async with Process(Command(argv=(sys.executable, "-c", script)), log=log) as process:
        await asyncio.wait_for(process.exited.wait(), 20)
    assert process.exit_code == 0
    assert log.stat().st_size <= 10_000 and log.with_suffix(".1").stat().st_size <= 10_000
    assert log.read_text().endswith("line 19999\n")


async def test_a_missing_program_raises_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot run /no/such/program"):
        async with Process(Command(argv=("/no/such/program",)), log=tmp_path / "log"):
            pass


async def test_cancelling_a_start_leaves_nothing(tmp_path: Path) -> None:
    async def start() -> None:
        async with running(tmp_path, startup_s="30s"):
            pass

    task = asyncio.create_task(start())
    await asyncio.sleep(0.7)
    assert mentioning(str(tmp_path))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not mentioning(str(tmp_path))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        with pytest.raises(InputError, match="is in use"):
            ports.reserve("127.0.0.1", number)


def test_a_port_is_not_reserved_twice() -> None:
    with ports.reserve("127.0.0.1") as port, pytest.raises(InputError, match="is in use"):
        ports.reserve("127.0.0.1", port.number)
    ports.reserve("127.0.0.1", port.number).__exit__(None, None, None)


async def test_another_port_is_used_if_the_port_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process binds the port between the reservation and the engine's start."""
    others: list[socket.socket] = []
    real = ports.reserve

    def reserve(host: str, number: int | None = None) -> ports.Port:
        port = real(host, number)
        if not others:
            other = socket.socket()
            other.bind((host, port.number))
            other.listen()
            others.append(other)
        return port

    monkeypatch.setattr(ports, "reserve", reserve)
    async with running(tmp_path) as replica:
        assert replica.port != others[0].getsockname()[1]
    others[0].close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", [0.1, 0.25, 0.4, 0.8, 1.5])
def test_no_process_is_left_after_run_is_killed(tmp_path: Path, number: signal.Signals, moment: float) -> None:
    argv = [
        sys.executable,
        "-m",
        "powerband",
        "run",
        "golden",
        "--engine",
        "fake",
        "--run-dir",
        str(tmp_path),
        "--json",
    ]
    process = subprocess.Popen(
        [*argv, "--set", "fault=leaves_child"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(moment)
    process.send_signal(number)
    process.wait(timeout=10)
    deadline = time.monotonic() + 5
    while mentioning(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not mentioning(str(tmp_path))
