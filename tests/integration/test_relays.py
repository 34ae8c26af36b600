"""Relays and keepers as real processes: what they do when engines, files and their own parents fail."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from powerband.core.engine import Command
from powerband.errors import EngineFailed
from powerband.runtime import ports
from powerband.runtime.process import Process
from powerband.serve import relay
from powerband.serve.control import local_replica


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
