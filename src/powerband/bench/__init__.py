"""The `bench` stage: apply load to one server and return a validated measurement."""

from __future__ import annotations

import contextlib
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import powerband
from powerband import engines
from powerband._callable import make_callable
from powerband.bench import profiles
from powerband.bench.level import Bench, Block
from powerband.bench.level_controller import LevelStatus, Plan
from powerband.bench.profiles import Amount, inconclusive, meets_slo
from powerband.core.measurement import Level, Measurement
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.engines.base import Engine
from powerband.errors import InputError
from powerband.launchers.local import Prepared
from powerband.load import prompts, tokens, wire
from powerband.load.wire import Target
from powerband.runtime import model_files
from powerband.runtime.replica import Replica

Profile = Literal["level", "sweep", "climb"]


@dataclass(frozen=True)
class BenchSpec:
    """What to measure."""

    workload: Workload
    slo: SLO | None = None
    profile: Profile = "level"
    rates: tuple[float, ...] = ()
    start_per_s: float | None = None
    min_per_s: float | None = None  # a climb stops if this rate misses the SLO
    coarse: bool = False  # a climb stops at a wide bracket without a confirming run; a closed loop stays closed
    feasible: bool = False  # a climb does not check concurrency 1 after a missed first rate
    amount: Amount = field(default_factory=Amount)
    base: Path | None = None  # folder of the workload's relative paths
    blocks: int = 1  # windows per level, each with other requests
    stop_early: bool = False  # stop a level once it cannot meet the SLO; a closed loop stays closed
    max_in_flight: int = 0  # 0: no limit
    senders: int = 1
    price_per_h: float | None = None
    tokenizer: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.profile == "climb" and self.slo is None:
            raise InputError("--profile climb requires an SLO", hint="add --slo, for example --slo interactive")
        if self.profile == "sweep" and not self.rates:
            raise InputError(
                "--profile sweep requires --rates",
                hint="add --rates 1,2,4, or use --profile climb to find the highest rate within the SLO",
            )


class LevelSource(Protocol):
    """What measures blocks of requests."""

    @property
    def ended(self) -> bool:
        """Return whether nothing more can be measured."""

    async def start_rate(self, workload: Workload) -> float:
        """Return the rate at which a climb starts."""

    async def measure(self, plan: Plan) -> Block:
        """Run one block of a level."""

    def combine(self, blocks: Sequence[Block]) -> Level:
        """Return the level of blocks of the same load."""


@dataclass
class Progress:
    """Callbacks that report progress."""

    on_status: Callable[[LevelStatus], None] = lambda _: None
    on_level: Callable[[Level], None] = lambda *_: None


async def bench(
    replica: Replica,
    prepared: Prepared,
    spec: BenchSpec,
    *,
    directory: Path,
    stopping: threading.Event | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure a ready replica; if `stopping` is set, return what was measured until then."""
    progress = progress or Progress()
    server = await _server_engine(replica)
    headers = tuple(replica.request_headers.items())
    context = Bench(
        replica=replica,
        target=Target(
            replica.url,
            await replica.model_name(),
            headers,
            keep_alive=server.keep_alive,
            beside=tuple(one.url for one in replica.beside),
        ),
        counts_at_end=server.counts_at_end,
        vocabulary=tokens.vocabulary(model_files.location(spec.tokenizer or prepared.deployment.variant.full_source)),
        directory=directory,
        slo=spec.slo,
        base=spec.base,
        max_in_flight=spec.max_in_flight,
        senders=spec.senders,
        price_per_h=spec.price_per_h,
        stopping=stopping or threading.Event(),
        on_status=progress.on_status,
    )
    levels = await measure_levels(context, spec, on_level=progress.on_level)
    return Measurement(
        name=prepared.deployment.served_name,
        profile=spec.profile,
        workload=spec.workload,
        slo=spec.slo,
        levels=tuple(levels),
        best=_best(levels) if spec.slo else None,
        interrupted=context.stopping.is_set(),
        startup_s=sum(timing.seconds for timing in replica.timings) if replica.process else None,
        price_per_h=spec.price_per_h,
        provenance=provenance(prepared, spec, context),
    )


async def measure_levels(
    source: LevelSource, spec: BenchSpec, *, on_level: Callable[[Level], None] = lambda _: None
) -> list[Level]:
    """Measure the levels of the spec's profile, until the source ends."""
    steps = await _steps(source, spec)
    levels: list[Level] = []
    blocks: list[Block] = []
    with contextlib.suppress(StopIteration):
        plan, same = next(steps)
        while not source.ended:
            block = await source.measure(plan)
            blocks = [*blocks, block] if same else [block]
            level = source.combine(blocks)
            levels = [*levels[:-1], level] if same else [*levels, level]
            on_level(level)
            plan, same = steps.send(level)
    return levels


async def _server_engine(replica: Replica) -> Engine[Any]:
    """Return the engine adapter of the server; a server behind a URL is identified by the name it reports."""
    llamacpp = replica.engine.attaches and await replica.server_name() == "llama.cpp"
    return engines.get("llamacpp") if llamacpp else replica.engine


async def _steps(source: LevelSource, spec: BenchSpec) -> profiles.Steps:
    if spec.slo and prompts.users(spec.workload) and (spec.coarse or spec.stop_early):
        return profiles.closed_loop(spec.workload, spec.slo, spec.amount)
    if spec.profile == "climb":
        assert spec.slo is not None
        start = spec.start_per_s or await source.start_rate(spec.workload)
        return profiles.climb(
            spec.workload,
            spec.slo,
            spec.amount,
            start_per_s=start,
            blocks=spec.blocks,
            min_per_s=spec.min_per_s or 0.0,
            coarse=spec.coarse,
            feasible=spec.feasible,
        )
    if spec.profile == "sweep":
        return profiles.sweep(spec.workload, spec.slo, spec.amount, rates=spec.rates, blocks=spec.blocks)
    workload = spec.workload
    if workload.rate_per_s is None and not prompts.users(workload):  # a trace at its recorded speed
        workload = workload.at_rate(prompts.recorded_rate(workload, base=spec.base))
    return profiles.one_level(workload, spec.slo, spec.amount, blocks=spec.blocks, stop_early=spec.stop_early)


def _best(levels: Sequence[Level]) -> int | None:
    """Return the index of the highest load that meets the SLO and is below every load that misses it.

    If a load was measured more than once, the last level counts. Inconclusive levels are ignored.
    """
    rates = any(level.rate_per_s for level in levels)  # then a closed-loop level among them is only a check
    last = {level.load: number for number, level in enumerate(levels) if level.rate_per_s or not rates}
    missed = [_load(one) for one in map(levels.__getitem__, last.values()) if not (meets_slo(one) or inconclusive(one))]
    lowest = min(missed, default=math.inf)
    met = [number for number in last.values() if meets_slo(levels[number]) and _load(levels[number]) < lowest]
    return max(met, key=lambda number: _load(levels[number]), default=None)


def _load(level: Level) -> float:
    return level.rate_per_s or level.users or 0.0


def provenance(prepared: Prepared, spec: BenchSpec, context: Bench) -> dict[str, Any]:
    """Return what is needed to reproduce the measurement."""
    deployment, host = prepared.deployment, prepared.host
    return {
        "powerband": powerband.__version__,
        "python": platform.python_version(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": spec.command or " ".join(sys.argv[1:]),
        "client": wire.kind(context.target),
        "tokens_by": "the model's tokenizer" if context.vocabulary.has_tokenizer else "words",
        "engine": prepared.installation.engine,
        "engine_version": prepared.installation.version,
        "engine_build": prepared.installation.build,
        "model": context.target.model,
        "model_bytes": prepared.model.weight_bytes,
        "deployment": deployment.to_data(),
        "deployment_digest": deployment.digest(),
        "workload_digest": spec.workload.digest(),
        "slo_digest": spec.slo.digest() if spec.slo else None,
        "machine": {**host.described(), "kernel": platform.release()},
    }


make_callable(__name__)
