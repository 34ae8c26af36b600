"""Measure a running deployment for a study: a screen, a climb, a fixed rate, a number of users."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import powerband.bench as bench
from powerband.bench.level_controller import LevelStatus
from powerband.bench.profiles import Amount, inconclusive, requests_needed
from powerband.core.deployment import Deployment
from powerband.core.measurement import Level, Measurement
from powerband.core.model import Model
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.errors import EngineError, InvalidMeasurement
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime.replica import Replica
from powerband.tune import screen

_SCREEN_SEED = 500_000  # of the screen's requests, which are the same for every deployment
_FIRST_REQUESTS, _SECOND_REQUESTS = 6, 24  # of the screen's two levels, at least
_REQUESTS_PER_USER = 4
_MAX_SCREEN_S = 12.0  # window of one of its levels

Report = Callable[[str], None]


@dataclass(kw_only=True)
class LoadRunner:
    """The load that all deployments of a study get."""

    model: Model
    workload: Workload
    slo: SLO
    usd_per_h: float  # of one device
    base: Path | None = None
    requests: int | None = None  # minimum at each load level
    max_level_s: float = 720.0  # a climb does not try rates whose level would take longer
    stopping: threading.Event = field(default_factory=threading.Event)
    report: Report = lambda _: None
    on_status: Callable[[LevelStatus], None] = lambda _: None

    @property
    def requests_per_level(self) -> int:
        """Return the number of requests at each load level."""
        return self.requests or requests_needed(self.slo)

    async def measure_screen(self, replica: Replica, prepared: Prepared, folder: Path) -> list[screen.Point]:
        """Measure one user, then more as long as the SLO and the throughput allow more."""
        points: list[screen.Point] = []
        users, requests = 1, _FIRST_REQUESTS
        while users:
            level = await self._screen_level(replica, prepared, folder / f"screen-{len(points) + 1}", users, requests)
            if not level.latencies:
                error = max(level.errors, key=lambda one: level.errors[one], default="no answer in time")
                raise EngineError(f"no request of the screen was answered: {error}", hint="read the engine's log")
            points.append(screen.point(level))
            users = screen.next_users(points, self.slo)
            requests = max(_SECOND_REQUESTS, _REQUESTS_PER_USER * users)
        return points

    async def _screen_level(
        self, replica: Replica, prepared: Prepared, folder: Path, users: int, requests: int
    ) -> Level:
        """Measure a closed loop, again if a guard rejects it; every deployment gets the same requests."""
        folder.mkdir(exist_ok=True)
        for attempt in range(2):
            level = await self.run_closed_loop(
                replica,
                prepared,
                folder,
                users=users,
                requests=requests,
                max_window_s=_MAX_SCREEN_S,
                seed=_SCREEN_SEED + 10 * users + attempt,
            )
            if not level.failed_guards or not inconclusive(level) or _only_short(level):
                return level
        raise _not_measured(level)

    async def climb(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        *,
        start_per_s: float | None,
        seed: int,
        min_per_s: float | None = None,
        feasible: bool = False,
    ) -> Measurement:
        """Bracket the highest rate within the SLO; raise InvalidMeasurement if no level could be measured."""
        min_per_s = max(min_per_s or 0.0, self.requests_per_level / self.max_level_s)
        rates = {"start_per_s": start_per_s, "min_per_s": min_per_s, "coarse": True, "feasible": feasible}
        amount = Amount(min_requests=self.requests, decide=True)
        workload = self.workload.with_seed(seed)
        found = await self._bench(replica, prepared, folder, workload, "climb", amount=amount, **rates)
        if found.interrupted:
            raise asyncio.CancelledError
        if all(map(inconclusive, found.levels)):
            raise _not_measured(found.levels[-1])
        return found

    async def run_fixed_rate(
        self, replica: Replica, prepared: Prepared, folder: Path, *, rate_per_s: float, seed: int, blocks: int = 2
    ) -> Level:
        """Measure one rate, in blocks that each have enough requests for the SLO; a closed loop keeps its users."""
        workload = self.workload.with_seed(seed).at_rate_if_open(rate_per_s)
        found = await self._bench(replica, prepared, folder, workload, "level", blocks=blocks, stop_early=True)
        return found.levels[-1]

    async def run_closed_loop(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        *,
        users: int,
        requests: int,
        max_window_s: float | None = None,
        seed: int = 0,
    ) -> Level:
        """Measure a number of concurrent users without think time."""
        workload = self.workload.with_users(users).with_seed(seed)
        amount = Amount(requests=requests, max_window_s=max_window_s)
        found = await self._bench(replica, prepared, folder, workload, "level", amount=amount)
        return found.levels[-1]

    def prepare(self, deployment: Deployment[Any]) -> Prepared:
        """Check a deployment against this machine; raise if it cannot run."""
        return local.prepare(deployment)

    def launch(
        self, prepared: Prepared, folder: Path, *, on_change: Callable[[Replica, str], None] = lambda *_: None
    ) -> contextlib.AbstractAsyncContextManager[Replica]:
        """Start a deployment; it stops with the context."""
        return local.launch(prepared, directory=folder, on_change=on_change)

    async def _bench(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        workload: Workload,
        profile: bench.Profile,
        **more: Any,
    ) -> Measurement:
        spec = bench.BenchSpec(
            workload=workload,
            slo=self.slo,
            profile=profile,
            base=self.base,
            price_per_h=self.usd_per_h * prepared.devices,
            command=f"powerband tune {self.model.source}",
            **{"amount": Amount(min_requests=self.requests), **more},
        )
        progress = bench.Progress(self.on_status, lambda level: self.report(describe_level(level)))
        found = await bench.bench(replica, prepared, spec, directory=folder, stopping=self.stopping, progress=progress)
        (folder / "measurement.json").write_text(found.to_json())
        if not found.levels:  # interrupted
            raise asyncio.CancelledError
        return found


def describe_level(level: Level) -> str:
    """Return the load of a level and its verdict; a short closed loop has a throughput instead."""
    short = level.users and _only_short(level)
    return f"{level.load}: {f'{level.achieved_per_s:.3g} req/s' if short else level.verdict}"


def _only_short(level: Level) -> bool:
    """Return whether a level has no fault but that it is short."""
    return {one.guard for one in level.failed_guards} <= {"sample size", "steady state", "concurrency"}


def _not_measured(level: Level) -> InvalidMeasurement:
    return InvalidMeasurement(
        f"no load level could be measured: {'; '.join(one.sentence for one in level.failed_guards)}",
        hint="stop other work on this machine, then rerun with --resume",
    )
