"""Run one replica, and the relay in front of it, on the machine of this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.errors import EngineFailed, InputError
from powerband.launchers import local
from powerband.runtime import ports
from powerband.runtime.descriptor_store import StoredDescriptors, StoredProcess
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
    probe: Callable[[], Awaitable[dict[str, float]]]  # returns the engine's metrics when it has answered, however late
    redirect_waiting: Callable[[], None]  # sends the requests without a token to other replicas
    gpus: tuple[int, ...] = ()  # indices on the replica's machine


@dataclass(frozen=True)
class StoredReplica:
    """A running replica as the descriptor store keeps it: the records and control sockets of its two processes."""

    engine: StoredProcess
    relay: StoredProcess


@contextlib.asynccontextmanager
async def run_replica(
    data: dict[str, Any],
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    secret: str = "",
    store: StoredDescriptors | None = None,
    about: Mapping[str, Any] | None = None,
    stored: StoredReplica | None = None,
    on_placed: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningReplica]:
    """Start a replica of a deployment, and yield it once it is ready; on the given port if that is free.

    The relay refuses requests without the `secret`, if there is one. The `store` keeps the replica with what is said
    `about` it, so that another supervisor can take it over as `stored`. `on_placed` is called when it has its devices.
    """
    directory.mkdir(parents=True, exist_ok=True)
    deployment, began = engines.deployment_of(data), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        if stored:
            engine, relay_process = [await Process.adopt(*one) for one in (stored.engine, stored.relay)]
            address = str(stored.relay[0]["address"])
            replica = local.adopt(deployment, stored.engine[0], engine, directory=directory)
            await stack.enter_async_context(replica)
        else:
            prepared = await asyncio.to_thread(local.prepare, deployment)
            launching = local.launch(prepared, directory=directory, on_change=lambda *_: on_placed())
            replica = await stack.enter_async_context(launching)
            assert replica.port is not None
            reserved = stack.enter_context(_reserve(host, port))
            command = relay.command(host, reserved.number, replica.port, secret)
            relay_process = Process(command, log=directory / "relay.log")
            address = f"{host}:{reserved.number}"
        await stack.enter_async_context(relay_process)
        if not stored:
            await _wait_listening(host, reserved.number, relay_process)
        if store and replica.process:
            records = {
                "engine": (replica.process, local.adoption_record(replica)),
                "relay": (relay_process, {"address": address}),
            }
            for name, (process, more) in records.items():
                key = f"{directory.name}/{name}"
                start_s = stored.engine[0]["start_s"] if stored else time.monotonic() - began
                record = {**process.record, **more, **(about or {}), "start_s": start_s}
                store.keep(key, record, process.control)
                stack.callback(store.drop, key)

        async def wait_ended() -> None:
            await _wait_first([replica.watch(), relay_process.exited.wait()])

        async def probe() -> dict[str, float]:
            return (await replica.probe()).model_dump(exclude_none=True)

        def redirect_waiting() -> None:
            if relay_process.pid:
                relay.redirect_waiting(relay_process.pid)

        pid = replica.process.pid if replica.process else None
        gpus = tuple(gpu.index for gpu in replica.allocation.gpus)
        yield RunningReplica(address, replica.url, pid, wait_ended, probe, redirect_waiting, gpus)
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
