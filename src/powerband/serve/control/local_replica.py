"""Run one replica, and the relay in front of it, on the machine of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.errors import EngineFailed, InputError
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
    responds: Callable[[], Awaitable[None]]  # returns when the engine has answered, however late
    redirect_waiting: Callable[[], None]  # sends the requests without a token to other replicas
    gpus: tuple[int, ...] = ()  # indices on the replica's machine


@contextlib.asynccontextmanager
async def run_replica(
    data: dict[str, Any],
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    secret: str = "",
    on_placed: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningReplica]:
    """Start a replica of a deployment, and yield it once it is ready; on the given port if that is free.

    The relay refuses requests without the `secret`, if there is one. `on_placed` is called when the replica has its
    devices.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prepared = await asyncio.to_thread(local.prepare, engines.deployment_of(data))
    async with contextlib.AsyncExitStack() as stack:
        launching = local.launch(prepared, directory=directory, on_change=lambda *_: on_placed())
        replica = await stack.enter_async_context(launching)
        assert replica.port is not None
        reserved = stack.enter_context(_reserve(host, port))
        command = relay.command(host, reserved.number, replica.port, secret)
        relay_process = await stack.enter_async_context(Process(command, log=directory / "relay.log"))
        await _wait_listening(host, reserved.number, relay_process)

        async def wait_ended() -> None:
            await _wait_first([replica.watch(), relay_process.exited.wait()])

        async def gauges() -> dict[str, float]:
            return (await replica.gauges()).model_dump(exclude_none=True)

        def redirect_waiting() -> None:
            if relay_process.pid:
                relay.redirect_waiting(relay_process.pid)

        pid = replica.process.pid if replica.process else None
        gpus = tuple(gpu.index for gpu in replica.allocation.gpus)
        yield RunningReplica(
            f"{host}:{reserved.number}", replica.url, pid, wait_ended, gauges, replica.responds, redirect_waiting, gpus
        )
        await asyncio.sleep(_RELAY_FLUSH_S)


def _reserve(host: str, number: int | None) -> Port:
    if number is not None:
        with contextlib.suppress(InputError):
            return ports.reserve(host, number)
    return ports.reserve(host)


async def _wait_listening(host: str, port: int, relay_process: Process) -> None:
    """Return once the relay accepts connections; raise if it ended because it cannot."""
    while not relay_process.exited.is_set():
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return
    raise EngineFailed(
        f"the relay in front of the engine cannot listen on {host}:{port}",
        hint="stop the program that uses this port; the fleet tries again",
        failure="exited",
    )


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
