"""A seat: the place of one replica in a fleet, filled again whenever it falls empty."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powerband.errors import PowerbandError
from powerband.launchers import local
from powerband.runtime import ports
from powerband.runtime.process import Process
from powerband.runtime.replica import Replica
from powerband.serve import relay
from powerband.serve.order import Part

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SETTLED_S = 0.1, 30.0, 60.0
_FAREWELL_S = 0.2  # for the relay to end the streams of a replica that died


class Seat:
    """One replica after the other, on this machine."""

    def __init__(self, name: str, pool: str, part: Part, folder: Path, *, on_change: Callable[[], None]) -> None:
        self.name, self.pool, self.part, self.folder, self.on_change = name, pool, part, folder, on_change
        self.replica: Replica | None = None
        self.draining = False
        self.starts = 0
        self.start_s: float | None = None
        self.problem = ""
        self._stopping = asyncio.Event()
        self._empty = asyncio.Event()
        self._port: int | None = None

    @property
    def address(self) -> str | None:
        """Return where the replica answers, if it does."""
        return f"127.0.0.1:{self._port}" if self.replica else None

    async def run(self) -> None:
        """Keep the seat filled until told to stop; wait longer after each start that failed."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            filled = time.monotonic()
            try:
                await self._fill()
                self.problem = ""
            except PowerbandError as error:
                self.problem = error.message.splitlines()[0]
            if time.monotonic() - filled > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            if not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._empty.set()

    async def _fill(self) -> None:
        """Start a replica, and return when it is gone."""
        self.starts += 1
        directory = self.folder / self.name
        directory.mkdir(exist_ok=True)
        began = time.monotonic()
        prepared = await asyncio.to_thread(local.prepare, self.part.deployment())
        async with contextlib.AsyncExitStack() as stack:
            replica = await stack.enter_async_context(local.launch(prepared, directory=directory))
            self._port = replica.port
            ends = [replica.watch(), self._stopping.wait()]
            if relay.compiled() and replica.port is not None:
                port = stack.enter_context(ports.reserve("127.0.0.1"))
                before = Process(relay.command(port.number, replica.port), log=directory / "relay.log")
                await stack.enter_async_context(before)
                await _listening(port.number)
                self._port = port.number
                ends.append(before.ended.wait())
            self.replica, self.start_s = replica, time.monotonic() - began
            self.on_change()
            try:
                await _first(ends)
            finally:
                self.replica = None
                self.on_change()
                await asyncio.sleep(_FAREWELL_S)

    async def stop(self) -> None:
        """Empty the seat for good."""
        self._stopping.set()
        await self._empty.wait()

    def status(self) -> dict[str, Any]:
        """Return how it is."""
        state = "draining" if self.draining else "ready" if self.replica else "starting"
        pid = self.replica.process.pid if self.replica and self.replica.process else None
        return {
            "name": self.name,
            "model": self.pool,
            "state": state,
            "address": self.address,
            "pid": pid,
            "starts": self.starts,
            "start_s": self.start_s,
            "problem": self.problem,
        }


async def _listening(port: int) -> None:
    """Return once somebody takes connections there."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
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
