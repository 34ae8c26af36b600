"""Run one replica, and the relay in front of it, on the machine of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.errors import InputError
from powerband.launchers import local
from powerband.runtime import ports
from powerband.runtime.ports import Port
from powerband.runtime.process import Process
from powerband.serve import relay

_RELAY_FLUSH_S = 0.2  # time for the relay to end the open streams of a replica that died


@dataclass(frozen=True)
class RunningReplica:
    """A replica that is ready for requests."""

    address: str  # of the relay, or of the engine where there is no relay
    engine_url: str
    pid: int | None
    wait_ended: Callable[[], Awaitable[None]]  # returns, or raises the cause, when the replica ends
    gauges: Callable[[], Awaitable[dict[str, float]]]  # the engine's own metrics


@contextlib.asynccontextmanager
async def run_replica(
    data: dict[str, Any], directory: Path, *, host: str = "127.0.0.1", port: int | None = None
) -> AsyncIterator[RunningReplica]:
    """Start a replica of a deployment, and yield it once it is ready; on the given port if that is free."""
    directory.mkdir(parents=True, exist_ok=True)
    prepared = await asyncio.to_thread(local.prepare, engines.deployment_of(data))
    async with contextlib.AsyncExitStack() as stack:
        replica = await stack.enter_async_context(local.launch(prepared, directory=directory))
        listen_port, relay_process = replica.port, None
        assert listen_port is not None
        if relay.compiled():
            reserved = stack.enter_context(_reserve(host, port))
            command = relay.command(host, reserved.number, listen_port)
            relay_process = await stack.enter_async_context(Process(command, log=directory / "relay.log"))
            await _wait_listening(host, reserved.number)
            listen_port = reserved.number

        async def wait_ended() -> None:
            await _wait_first([replica.watch(), *([relay_process.exited.wait()] if relay_process else [])])

        async def gauges() -> dict[str, float]:
            return (await replica.gauges()).model_dump(exclude_none=True)

        pid = replica.process.pid if replica.process else None
        yield RunningReplica(f"{host}:{listen_port}", replica.url, pid, wait_ended, gauges)
        await asyncio.sleep(_RELAY_FLUSH_S)


def _reserve(host: str, number: int | None) -> Port:
    if number is not None:
        with contextlib.suppress(InputError):
            return ports.reserve(host, number)
    return ports.reserve(host)


async def _wait_listening(host: str, port: int) -> None:
    """Return once the port accepts connections."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return


async def _wait_first(awaitables: list[Any]) -> None:
    """Wait until the first of several awaitables is done, and raise its exception, if any."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in tasks:
            one.cancel()
