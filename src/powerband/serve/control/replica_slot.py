"""A seat: the place of one replica in a fleet, filled again whenever it falls empty."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powerband.errors import PowerbandError
from powerband.serve.control import local_replica
from powerband.serve.spec import ModelSpec

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SETTLED_S = 0.1, 30.0, 5.0
_ABOUT = ("ttft_s", "usd_per_h", "weights_bytes", "kv_bytes")  # of a part, for whoever watches


class ReplicaSlot:
    """One replica after the other."""

    def __init__(
        self, name: str, pool: str, part: ModelSpec, folder: Path, *, afar: bool, on_change: Callable[[], None]
    ) -> None:
        self.name, self.pool, self.part, self.folder = name, pool, part, folder
        self.afar, self.on_change = afar, on_change
        self.replica: local_replica.RunningReplica | None = None
        self._port: int | None = None  # of the last one: requests that wait for an answer may still ask there
        self.draining = False
        self.warm = False  # started, and asked nothing
        self.starts = 0
        self.start_s: float | None = None
        self.problem = ""
        self.gauges: dict[str, float] = {}
        self._stopping = asyncio.Event()
        self._empty = asyncio.Event()

    @property
    def address(self) -> str | None:
        """Return where the replica answers, if it does."""
        return self.replica.address if self.replica else None

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
        began = time.monotonic()
        stopping = asyncio.create_task(self._stopping.wait())
        data, directory = self.part.deployment().to_data(units=True), self.folder / self.name
        try:
            async with self._taken(data, directory) as replica:
                self.replica, self.start_s = replica, time.monotonic() - began
                self._port = int(replica.address.rpartition(":")[2])
                self.on_change()
                gone = asyncio.ensure_future(replica.ended())
                try:
                    await asyncio.wait([gone, stopping], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.replica = None
                    self.on_change()
                if not gone.cancel():
                    gone.exception()  # why it is gone stands in its log
        finally:
            stopping.cancel()

    def _taken(
        self, data: dict[str, Any], directory: Path
    ) -> contextlib.AbstractAsyncContextManager[local_replica.RunningReplica]:
        if self.afar:
            from powerband.serve.control import ray_replica

            return ray_replica.run_replica(data, directory)
        return local_replica.run_replica(data, directory, port=self._port)

    async def read_gauges(self) -> None:
        """Ask the engine what it counts; one that is too busy to say so is not asked for long."""
        if self.replica:
            with contextlib.suppress(Exception):
                self.gauges = await asyncio.wait_for(self.replica.gauges(), 5)

    async def stop(self) -> None:
        """Empty the seat for good."""
        self._stopping.set()
        await self._empty.wait()

    def _state(self) -> str:
        if self.draining:
            return "draining"
        return "starting" if not self.replica else "warm" if self.warm else "ready"

    def status(self) -> dict[str, Any]:
        """Return how it is."""
        return {
            "name": self.name,
            "model": self.pool,
            "recipe": self.part.recipe,
            "state": self._state(),
            "address": self.address,
            "engine": self.replica.engine if self.replica else None,
            "pid": self.replica.pid if self.replica else None,
            "starts": self.starts,
            "start_s": self.start_s,
            "problem": self.problem,
            "gauges": self.gauges,
            "about": {name: getattr(self.part, name) for name in _ABOUT},
        }
