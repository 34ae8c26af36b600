"""Run trials in virtual time, on simulated engines: for rehearsals, and for proofs of the search."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from powerband.bench import BenchSpec, Profile, measure_levels
from powerband.bench.profiles import Amount
from powerband.core.deployment import Deployment
from powerband.core.measurement import Measurement
from powerband.core.study import Settings
from powerband.core.workload import Workload
from powerband.errors import EngineFailed
from powerband.launchers.local import Prepared
from powerband.plan.predict import Requests
from powerband.runtime.replica import Replica
from powerband.tune.load_runner import describe_level
from powerband.tune.trial_runner import FIRST_PROBES, TrialRunner
from powerband.tune.virtual_levels import Answer, VirtualLevels

_DECIDED_SHARE = 0.5  # of the probes that a quality check needs, on average


class World(Protocol):
    """What deployments do."""

    reference_s: float  # that the reference needs for all probes
    check_s: float  # that a deployment needs for all probes

    def start_s(self, settings: Settings) -> float:
        """Return how long the engine starts."""

    def failure(self, settings: Settings) -> str:
        """Return why the engine does not start; empty: it starts."""

    def keeps_floor(self, settings: Settings) -> bool:
        """Return whether the answers are within the quality floor."""

    def engine(self, settings: Settings) -> Answer:
        """Return a function that answers the requests of one level."""


@dataclass(frozen=True)
class VirtualDeployment:
    """Stands for a deployment, and for a prepared one."""

    settings: Settings
    devices: int


class VirtualReplica:
    """Stands for a running engine."""

    def memory_bytes(self) -> None:
        """Return nothing: a simulated engine has no memory."""


@dataclass(kw_only=True)
class VirtualRunner(TrialRunner):
    """A runner whose engines are simulated and whose clock is the event loop's."""

    world: World
    sampled: Requests
    now: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    _asked: float = field(default=0.0, init=False)  # share of the probes that the reference has answered

    async def deployment(self, settings: Settings) -> Deployment[Any]:
        """Return a stand-in; nothing is built."""
        return VirtualDeployment(settings, self.devices(settings))  # type: ignore[return-value]

    def prepare(self, deployment: Deployment[Any]) -> Prepared:
        """Return the deployment itself: what cannot run is not in the search space."""
        return deployment  # type: ignore[return-value]

    @contextlib.asynccontextmanager
    async def launch(
        self, prepared: Prepared, folder: Path, *, on_change: Callable[[Replica, str], None] = lambda *_: None
    ) -> AsyncIterator[Replica]:
        """Wait as long as a start takes."""
        settings = _settings(prepared)
        await asyncio.sleep(self.world.start_s(settings))
        if reason := self.world.failure(settings):
            raise EngineFailed(reason, hint="read the engine's log", failure="crashed")
        yield VirtualReplica()  # type: ignore[misc]

    async def ask_reference(self, settings: Settings, *, share: float = 1.0) -> None:
        """Wait until the reference has answered a share of the probes."""
        if self._quality_spec(settings, share):
            async with self._asking, self.holding(self.devices(self._reference_settings())):
                if share > self._asked:
                    start_s = self.world.start_s(self._reference_settings())
                    await asyncio.sleep(start_s + (share - self._asked) * self.world.reference_s)
                    self._asked = share

    async def quality_check(
        self, settings: Settings, running: tuple[Prepared, Replica] | None = None
    ) -> dict[str, Any]:
        """Judge the answers, in about the time that the probes take."""
        if self._quality_spec(settings, 1.0) is None:
            return {"passed": True}
        if not running:
            await self.ask_reference(settings)
            await asyncio.sleep(self.world.start_s(settings))
        await asyncio.sleep(self.world.check_s * (FIRST_PROBES if running else _DECIDED_SHARE))
        if self.world.keeps_floor(settings):
            return {"quality": "pass", "passed": True}
        return {"quality": "fail", "passed": False, "outcome": "below the floor", "reason": "degraded answers"}

    async def _bench(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        workload: Workload,
        profile: Profile,
        **more: Any,
    ) -> Measurement:
        spec = BenchSpec(
            workload=workload, slo=self.slo, profile=profile, **{"amount": Amount(min_requests=self.requests), **more}
        )
        settings = _settings(prepared)
        levels = VirtualLevels(lambda: self.world.engine(settings), self.sampled, self.slo)
        found = await measure_levels(levels, spec, on_level=lambda level: self.report(describe_level(level)))
        return Measurement(name="virtual", profile=profile, workload=workload, slo=self.slo, levels=tuple(found))


def _settings(prepared: Prepared) -> Settings:
    assert isinstance(prepared, VirtualDeployment)
    return prepared.settings
