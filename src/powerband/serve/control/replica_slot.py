"""A replica slot: one replica of a fleet, restarted whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powerband.core.allocation import NoRoom
from powerband.errors import EngineFailed, PowerbandError
from powerband.runtime.descriptor_store import StoredDescriptors
from powerband.serve.control import local_replica
from powerband.serve.spec import ModelSpec

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
# An engine that does not answer for this long hangs: at least 7.5 s and twice the SLO's TTFT, or half a minute without
# an SLO, and at least three times as long as it needed for an answer before. After a minute more it is started again.
_HUNG_S, _HUNG_WITHOUT_SLO_S, _HUNG_RATIO, _RESTART_S = 7.5, 30.0, 3.0, 60.0
_PROBE_INTERVAL_S = 2.0
_ABOUT = ("ttft_s", "usd_per_h", "weights_bytes", "kv_bytes")  # fields of the model spec that the status repeats


class ReplicaSlot:
    """Keeps one replica running: restarts it with exponential back-off until the slot is stopped."""

    def __init__(
        self,
        name: str,
        pool: str,
        model_spec: ModelSpec,
        folder: Path,
        *,
        on_change: Callable[[], None],
        on_ray: bool = False,
        secret: str = "",
        store: StoredDescriptors | None = None,
        stored: local_replica.StoredReplica | None = None,
    ) -> None:
        self.name, self.pool, self.model_spec, self.folder = name, pool, model_spec, folder
        self.on_ray, self.secret, self.on_change = on_ray, secret, on_change
        self.store = store  # keeps the replica for the next supervisor
        self._stored = stored  # by the supervisor before this one
        self.replica: local_replica.RunningReplica | None = None
        self._port: int | None = None  # reused after a restart, because retried requests may still go to it
        self.draining = False
        self.warm = False  # ready, but receives no requests
        self.starts = int(stored.engine[0]["starts"]) if stored else 0
        self.start_s: float | None = stored.engine[0]["start_s"] if stored else None
        self._was_ready = False
        self.problem = ""
        self.no_room = False  # the last start found too few free devices
        self.tried_at = 0.0  # when the last start that failed began, on the monotonic clock
        self.hung = False  # the engine does not answer; it gets no requests
        self.gauges: dict[str, float] = {}
        self._stopping = asyncio.Event()
        self._retrying = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def address(self) -> str | None:
        """Return the replica's address, or None while it is not ready."""
        return self.replica.address if self.replica else None

    @property
    def ready(self) -> bool:
        """Return whether the replica answers."""
        return self.replica is not None and not self.hung

    async def run(self) -> None:
        """Run replicas one after the other until `stop` is called; back off while starts fail."""
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            self._was_ready = False
            self._retrying.clear()
            began = time.monotonic()
            try:
                await self._run_once()
                self.problem = ""
            except PowerbandError as error:
                self.problem, self.no_room = error.message.splitlines()[0], isinstance(error, NoRoom)
                self.tried_at = began
            except OSError as error:  # such as a full disk: the next start may succeed
                self.problem, self.no_room = str(error), False
            if self._was_ready:
                backoff_s = _MIN_BACKOFF_S
            if not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._retrying.wait(), backoff_s)
                backoff_s = _MIN_BACKOFF_S if self._retrying.is_set() else min(2 * backoff_s, _MAX_BACKOFF_S)
        self._stopped.set()

    async def _run_once(self) -> None:
        """Start a replica, and return when it ended or the slot is stopped."""
        stored, self._stored = self._stored, None
        self.starts += not stored
        began = time.monotonic()
        stopping = asyncio.create_task(self._stopping.wait())
        data, directory = self.model_spec.deployment().to_data(units=True), self.folder / self.name
        try:
            async with self._run_replica(data, directory, stored) as replica:
                self.replica, self._was_ready = replica, True
                self.start_s = self.start_s if stored else time.monotonic() - began
                self._port = int(replica.address.rpartition(":")[2])
                self.on_change()
                ended = asyncio.ensure_future(replica.wait_ended())
                watching = asyncio.ensure_future(self._watch_responses(replica))
                try:
                    await asyncio.wait([ended, stopping, watching], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.replica, self.hung = None, False
                    self.on_change()
                if not ended.cancel():
                    ended.exception()  # marks it as retrieved; the cause is in the replica's log
                if not watching.cancel():
                    watching.result()  # raises: the engine hangs for too long
        finally:
            stopping.cancel()

    async def _watch_responses(self, replica: local_replica.RunningReplica) -> None:
        """Take the replica out while its engine does not answer; raise EngineFailed if it stays so."""
        slowest_s, ttft_s = 0.0, self.model_spec.ttft_s
        least_s = max(_HUNG_S, 2 * ttft_s) if ttft_s else _HUNG_WITHOUT_SLO_S
        while True:
            began, limit_s = time.monotonic(), max(least_s, _HUNG_RATIO * slowest_s)
            response = asyncio.ensure_future(replica.probe())
            try:
                await asyncio.wait([response], timeout=limit_s)
                if response.done():
                    slowest_s = max(0.9 * slowest_s, time.monotonic() - began)
                else:
                    self._set_hung(True)
                    replica.redirect_waiting()
                    await asyncio.wait([response], timeout=_RESTART_S)
                if not response.done():
                    waited_s = time.monotonic() - began
                    raise EngineFailed(
                        f"the engine did not answer for {waited_s:.0f} s (limit {limit_s:.0f} s)",
                        hint="it is started again; its log may show the cause",
                        failure="no_answer",
                    )
                if not response.exception():  # else the process is ending, which `wait_ended` notices
                    self.gauges = response.result()
                    self._set_hung(False)
            finally:
                response.cancel()
            await asyncio.sleep(_PROBE_INTERVAL_S)

    def _set_hung(self, hung: bool) -> None:
        if hung != self.hung:
            self.hung = hung
            self.on_change()

    def _run_replica(
        self, data: dict[str, Any], directory: Path, stored: local_replica.StoredReplica | None
    ) -> contextlib.AbstractAsyncContextManager[local_replica.RunningReplica]:
        if self.on_ray:
            from powerband.serve.control import ray_replica

            spec = self.model_spec
            return ray_replica.run_replica(
                data, directory, gpus=spec.devices, over_nodes=spec.over_nodes, secret=self.secret
            )
        return local_replica.run_replica(
            data,
            directory,
            port=self._port,
            store=self.store,
            about={"model": self.pool, "data": data, "starts": self.starts},
            stored=stored,
            on_placed=self._on_placed,
        )

    def _on_placed(self) -> None:
        if self.no_room:
            self.no_room, self.problem = False, ""

    def retry(self) -> None:
        """Start again now, if the slot waits for devices."""
        if self.no_room:
            self._retrying.set()

    async def stop(self) -> None:
        """Stop the replica, and do not restart it."""
        self._stopping.set()
        self._retrying.set()
        await self._stopped.wait()

    def _state(self) -> str:
        if self.draining:
            return "draining"
        if not self.replica:
            return "no room" if self.no_room else "starting"
        if self.hung:
            return "hung"
        return "warm" if self.warm else "ready"

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
            "gpus": self.replica.gpus if self.replica else (),
            "starts": self.starts,
            "start_s": self.start_s,
            "problem": self.problem,
            "gauges": self.gauges,
            "about": {name: getattr(self.model_spec, name) for name in _ABOUT},
        }
