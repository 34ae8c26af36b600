"""A replica slot: one replica of a fleet, restarted whenever it ends."""

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

_MIN_BACKOFF_S, _MAX_BACKOFF_S, _BACKOFF_RESET_S = 0.1, 30.0, 5.0
_GAUGES_TIMEOUT_S = 5.0
_ABOUT = ("ttft_s", "usd_per_h", "weights_bytes", "kv_bytes")  # fields of the model spec that the status repeats


class ReplicaSlot:
    """Keeps one replica running: restarts it with exponential back-off until the slot is stopped."""

    def __init__(
        self, name: str, pool: str, model_spec: ModelSpec, folder: Path, *, on_ray: bool, on_change: Callable[[], None]
    ) -> None:
        self.name, self.pool, self.model_spec, self.folder = name, pool, model_spec, folder
        self.on_ray, self.on_change = on_ray, on_change
        self.replica: local_replica.RunningReplica | None = None
        self._port: int | None = None  # reused after a restart, because retried requests may still go to it
        self.draining = False
        self.warm = False  # ready, but receives no requests
        self.starts = 0
        self.start_s: float | None = None
        self.problem = ""
        self.gauges: dict[str, float] = {}
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def address(self) -> str | None:
        """Return the replica's address, or None while it is not ready."""
        return self.replica.address if self.replica else None

    async def run(self) -> None:
        """Run replicas one after the other until `stop` is called; back off while starts fail."""
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._run_once()
                self.problem = ""
            except PowerbandError as error:
                self.problem = error.message.splitlines()[0]
            if time.monotonic() - began > _BACKOFF_RESET_S:
                backoff_s = _MIN_BACKOFF_S
            if not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        self._stopped.set()

    async def _run_once(self) -> None:
        """Start a replica, and return when it ended or the slot is stopped."""
        self.starts += 1
        began = time.monotonic()
        stopping = asyncio.create_task(self._stopping.wait())
        data, directory = self.model_spec.deployment().to_data(units=True), self.folder / self.name
        try:
            async with self._run_replica(data, directory) as replica:
                self.replica, self.start_s = replica, time.monotonic() - began
                self._port = int(replica.address.rpartition(":")[2])
                self.on_change()
                ended = asyncio.ensure_future(replica.wait_ended())
                try:
                    await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.replica = None
                    self.on_change()
                if not ended.cancel():
                    ended.exception()  # marks it as retrieved; the cause is in the replica's log
        finally:
            stopping.cancel()

    def _run_replica(
        self, data: dict[str, Any], directory: Path
    ) -> contextlib.AbstractAsyncContextManager[local_replica.RunningReplica]:
        if self.on_ray:
            from powerband.serve.control import ray_replica

            return ray_replica.run_replica(data, directory)
        return local_replica.run_replica(data, directory, port=self._port)

    async def read_gauges(self) -> None:
        """Read the engine's metrics; keep the last ones if the engine does not answer in time."""
        if self.replica:
            with contextlib.suppress(Exception):
                self.gauges = await asyncio.wait_for(self.replica.gauges(), _GAUGES_TIMEOUT_S)

    async def stop(self) -> None:
        """Stop the replica, and do not restart it."""
        self._stopping.set()
        await self._stopped.wait()

    def _state(self) -> str:
        if self.draining:
            return "draining"
        return "starting" if not self.replica else "warm" if self.warm else "ready"

    def status(self) -> dict[str, Any]:
        """Return the slot's entry in `status.json`."""
        return {
            "name": self.name,
            "model": self.pool,
            "recipe": self.model_spec.recipe,
            "state": self._state(),
            "address": self.address,
            "engine": self.replica.engine_url if self.replica else None,
            "pid": self.replica.pid if self.replica else None,
            "starts": self.starts,
            "start_s": self.start_s,
            "problem": self.problem,
            "gauges": self.gauges,
            "about": {name: getattr(self.model_spec, name) for name in _ABOUT},
        }
