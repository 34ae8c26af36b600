"""A place where one replica runs, with the relay before it; the same on this machine and on a node of a cluster."""

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

_FAREWELL_S = 0.2  # for the relay to end the streams of a replica that died


@dataclass(frozen=True)
class RunningReplica:
    """A replica that answers."""

    address: str
    engine: str  # its own URL, behind the relay
    pid: int | None
    ended: Callable[[], Awaitable[None]]  # returns, or raises why, when it is gone
    gauges: Callable[[], Awaitable[dict[str, float]]]  # what the engine counts itself


@contextlib.asynccontextmanager
async def run_replica(
    data: dict[str, Any], directory: Path, *, host: str = "127.0.0.1", port: int | None = None
) -> AsyncIterator[RunningReplica]:
    """Start a replica of a deployment, and yield it once it answers: at that port again, if nobody took it."""
    directory.mkdir(parents=True, exist_ok=True)
    prepared = await asyncio.to_thread(local.prepare, engines.deployment_of(data))
    async with contextlib.AsyncExitStack() as stack:
        replica = await stack.enter_async_context(local.launch(prepared, directory=directory))
        answering, before = replica.port, None
        assert answering is not None
        if relay.compiled():
            own = stack.enter_context(_reserved(host, port))
            before = Process(relay.command(host, own.number, answering), log=directory / "relay.log")
            await stack.enter_async_context(before)
            await _listening(host, own.number)
            answering = own.number

        async def ended() -> None:
            await _first([replica.watch(), *([before.ended.wait()] if before else [])])

        async def gauges() -> dict[str, float]:
            return (await replica.gauges()).model_dump(exclude_none=True)

        pid = replica.process.pid if replica.process else None
        yield RunningReplica(f"{host}:{answering}", replica.url, pid, ended, gauges)
        await asyncio.sleep(_FAREWELL_S)


def _reserved(host: str, number: int | None) -> Port:
    if number is not None:
        with contextlib.suppress(InputError):
            return ports.reserve(host, number)
    return ports.reserve(host)


async def _listening(host: str, port: int) -> None:
    """Return once somebody takes connections there."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return


async def _first(ends: list[Any]) -> None:
    """Wait for the first of several ends, and raise what it raised."""
    tasks = [asyncio.ensure_future(one) for one in ends]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in tasks:
            one.cancel()
