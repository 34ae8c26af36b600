"""The context of an engine's checks: what was started, measured and fitted so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.coefficients import Coefficients
from powerband.core.deployment import Deployment
from powerband.core.engine import Installation
from powerband.core.host import Gpu, Host
from powerband.core.model import Model
from powerband.core.records import Records
from powerband.core.selftest import ProbeRow
from powerband.core.workload import Workload
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.load import generator, prompts, tokens
from powerband.load.generator import LoadProgress
from powerband.load.wire import Target
from powerband.plan import calibrate
from powerband.runtime import devices, gpus
from powerband.runtime.replica import Replica
from powerband.selftest.check import Deadline

_MIN_START_S = 60.0
_LOOP_PROMPT, _LOOP_OUTPUT = 96, 32  # tokens of each request of a closed loop
_MAX_LOOP_S = 120.0


@dataclass
class EngineRun:
    """An engine under test; the first start serves several checks."""

    host: Host
    installation: Installation
    model: Model
    folder: Path
    probe_s: float
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))
    report: Callable[[str], None] = lambda _: None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    prepared: Prepared | None = None
    replica: Replica | None = None  # of the first start, while it runs
    free_before: dict[str, int] = field(default_factory=dict)  # bytes, by GPU
    start_s: float | None = None
    probes: tuple[ProbeRow, ...] = ()
    calibration: Coefficients | None = None

    @property
    def engine(self) -> str:
        """Return the engine's name."""
        return self.installation.engine

    def probe_deployment(self) -> Deployment[Any]:
        """Return the engine's defaults, with limits that are high enough for the planner's probes."""
        return calibrate.with_probe_capacity(self.deployment({}), on_cpu=not self.host.gpus)

    def deployment(self, config: dict[str, Any], *, cores: int | None = None) -> Deployment[Any]:
        """Return a deployment of the model with these knobs."""
        variant = {"source": self.model.source}
        data = {"name": "selftest", "variant": variant, "engine": self.engine, "config": config}
        return engines.deployment_of({**data, "placement": {"cores": cores}})

    def prepare(self, deployment: Deployment[Any]) -> Prepared:
        """Check a deployment against this machine as it is now."""
        host = self.host.model_copy(update={"gpus": current_gpus()}) if self.host.gpus else self.host
        return Prepared(deployment, installation=self.installation, model=self.model, host=host)

    def launch(self, prepared: Prepared, name: str) -> AbstractAsyncContextManager[Replica]:
        """Start a replica with its files in a folder of this name, within the time that is left."""
        folder = self.folder / f"{self.engine}-{name}"
        folder.mkdir(parents=True)
        limit_s = min(prepared.start_timeout_s, max(_MIN_START_S, self.deadline.remaining_s))
        return local.launch(prepared, directory=folder, ready_timeout_s=limit_s)


def refusals(prepared: Prepared) -> list[str]:
    """Return the reasons not to start a deployment."""
    return [problem.sentence for problem in prepared.problems if problem.severity == "refuse"]


def current_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs with their memory as it is now."""
    return gpus.visible(devices.system_root())[0]


def free_bytes() -> dict[str, int]:
    """Return the free memory of each GPU."""
    return {gpu.id: gpu.free_bytes for gpu in current_gpus()}


@dataclass(frozen=True)
class LoopResult:
    """A closed loop of equal requests."""

    tokens_per_s: float
    failed: int


async def closed_loop(replica: Replica, *, users: int, requests: int, seed: int) -> LoopResult:
    """Send requests of equal lengths, `users` at a time; those that the time limit leaves unanswered have failed."""
    target = Target(
        replica.url,
        await replica.model_name(),
        tuple(replica.request_headers.items()),
        keep_alive=replica.engine.keep_alive,
    )
    workload = Workload.model_validate(
        {
            "arrivals": {"process": "closed", "users": users},
            "prompt": {"shape": "fixed", "tokens": _LOOP_PROMPT},
            "output": {"shape": "fixed", "tokens": _LOOP_OUTPUT},
            "seed": seed,
        }
    )
    vocabulary = tokens.vocabulary(replica.deployment.variant.source)
    traffic = prompts.prepare(workload, requests, vocabulary=vocabulary)

    def too_long(progress: LoadProgress, _: Records) -> bool:
        return progress.elapsed_s > _MAX_LOOP_S

    records = (await asyncio.to_thread(generator.drive, target, traffic, until=too_long)).records
    seconds = (max(records["end"]) - min(records["due"])) / 1e9
    return LoopResult(requests * _LOOP_OUTPUT / seconds, requests - sum(records.complete()))
