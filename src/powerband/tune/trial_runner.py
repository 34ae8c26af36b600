"""Run one trial: build the variant, start the engine, check quality, and find the highest rate within the SLO."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import powerband.bench as bench
import powerband.evaluate as gate
import powerband.plan as plan
from powerband import engines
from powerband import quantize as quantizing
from powerband.bench.level_controller import LevelStatus
from powerband.bench.profiles import Amount, inconclusive, max_rate, requests_needed
from powerband.core.deployment import Deployment
from powerband.core.engine import StepProgress
from powerband.core.evaluation import Evaluation
from powerband.core.measurement import Level, Measurement
from powerband.core.model import Model
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import ENGINE, Settings, Trial, render_settings
from powerband.core.workload import Workload
from powerband.errors import DeploymentRefused, EngineError, InputError, InvalidMeasurement, PowerbandError
from powerband.evaluate.probes import probes
from powerband.evaluate.tasks import Task
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime.replica import Replica
from powerband.tune.search_space import WEIGHTS, Key, SearchSpace, key

HELD_OUT_SEED = 1_000_000  # workload seeds from here on generate requests that the search never uses
_QUICK_SAMPLES = 8  # probes of each class in the quick quality check
_READY_TIMEOUT_S = 300.0
_MIN_TIMEOUT_S, _TIMEOUT_LEVELS = 1800.0, 3  # a trial times out after this long, or after this many load levels
_UNQUANTIZED = "f16"  # GGUF scheme that represents 16-bit weights without loss

Report = Callable[[str], None]


class RunTrial(Protocol):
    """A function that runs one trial; None: the node that ran it is gone."""

    async def __call__(
        self, number: int, settings: Settings, *, expected: Interval | None, best: Trial | None
    ) -> Trial | None: ...


@dataclass
class TrialRunner:
    """What all trials of a study share, and how to run one."""

    model: Model
    workload: Workload
    slo: SLO
    floor: QualityFloor | None
    space: SearchSpace
    folder: Path
    usd_per_h: float
    base: Path | None = None
    requests: int | None = None  # minimum at each load level
    max_level_s: float = 720.0  # a climb does not try rates whose level would take longer
    parallel_trials: int = 1  # one on each node
    tasks: dict[str, Task] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    report: Report = lambda _: None
    on_status: Callable[[LevelStatus], None] = lambda _: None
    quality_verdicts: dict[Key, Trial] = field(default_factory=dict)  # by the settings that can change answers
    _reference: Prepared | None = None

    @property
    def timeout_s(self) -> float:
        """Return the time limit of a trial."""
        return max(_MIN_TIMEOUT_S, _TIMEOUT_LEVELS * self.max_level_s)

    def remember_quality(self, trial: Trial) -> None:
        """Remember the quality verdict of a trial, for later trials with the same quality settings."""
        if trial.quality:  # a later trial has at least the verdicts of the earlier ones
            self.quality_verdicts[key(self.space.quality_settings(trial.settings))] = trial

    def elapsed_s(self, trials: Sequence[Trial]) -> float:
        """Return the wall-clock time that trials took."""
        return sum(one.seconds for one in trials) / self.parallel_trials

    async def deployment(self, settings: Settings) -> Deployment[Any]:
        """Return the deployment with these settings; build its variant if it is not in the cache."""
        source, scheme = self.model.source, settings.get(WEIGHTS)
        if scheme and scheme != plan.published_scheme(self.model).name:

            def on_step(step: StepProgress) -> None:
                if step.starts:
                    self.report(f"{scheme}: {step.title}")

            made = await quantizing.quantize(quantizing.QuantizeSpec(source, scheme), progress=on_step)
            source = str(made.path)
        data = {
            "name": Path(self.model.source).name,
            "variant": {"source": source, "scheme": scheme},
            "engine": settings[ENGINE],
            "config": self.space.config(settings),
        }
        return engines.deployment_of(data)

    def _reference_settings(self) -> Settings:
        published = plan.published_scheme(self.model)
        able = [name for name in self.space.by_engine if published.format in engines.get(name).formats]
        engine = able[0] if able else next(iter(self.space.by_engine))
        return self.space.defaults(engine) | {WEIGHTS: (published.name if able else _UNQUANTIZED) or ""}

    def matches_reference(self, settings: Settings) -> bool:
        """Return whether settings differ from the reference in nothing that can change answers."""
        return self.space.quality_settings(settings) == self.space.quality_settings(self._reference_settings())

    async def reference(self) -> Prepared:
        """Return the quality reference: the published weights, or a lossless conversion if no engine loads them."""
        if self._reference is None:
            settings = self._reference_settings()
            deployment = await self.deployment(settings)
            config = deployment.config.model_copy(update=dict(self.space.fast_start[settings[ENGINE]]))
            self._reference = local.prepare(deployment.model_copy(update={"name": "reference", "config": config}))
        return self._reference

    def reference_data(self) -> dict[str, Any]:
        """Return the reference deployment as data; empty if no quality check ran."""
        return self._reference.deployment.to_data(units=True) if self._reference else {}

    def _quality_spec(self, *, quick: bool) -> gate.EvaluateSpec | None:
        """Return the spec of the quick check, fidelity alone, or of the full one; None: there is nothing to check."""
        floor = self.floor.model_copy(update={"tasks": {}}) if self.floor and quick else self.floor
        if floor is None or not (floor.fidelity or floor.tasks):
            return None
        if quick:
            return gate.EvaluateSpec(floor, probes(samples=_QUICK_SAMPLES))
        return gate.EvaluateSpec(floor, probes(), tasks=self.tasks)

    async def quick_quality_check(self, prepared: Prepared, replica: Replica) -> Evaluation | None:
        """Evaluate a running deployment on a few probes, enough to catch clearly degraded answers."""
        spec = self._quality_spec(quick=True)
        return await gate.evaluate(await self.reference(), prepared, spec, running=replica) if spec else None

    async def full_quality_check(self, settings: Settings) -> str:
        """Start the deployment, evaluate it on all probes and tasks, and return why it fails; empty: it passes."""
        spec = self._quality_spec(quick=False)
        if spec is None or self.matches_reference(settings):
            return ""
        self.report(f"full quality check of {render_settings(settings, self.space.all_defaults)}")
        prepared = local.prepare(await self.deployment(settings))
        judged = await gate.evaluate(await self.reference(), prepared, spec, progress=self._report_quality)
        return "" if judged.verdict == "pass" else f"{judged.verdict}: {judged.reason}"

    def _report_quality(self, message: str) -> None:
        self.report(f"quality: {message}")

    async def climb(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        *,
        start_per_s: float | None,
        seed: int,
        min_per_s: float | None = None,
    ) -> Measurement:
        """Bracket the highest rate within the SLO; raise InvalidMeasurement if no level could be measured."""
        min_per_s = max(min_per_s or 0.0, (self.requests or requests_needed(self.slo)) / self.max_level_s)
        rates = {"start_per_s": start_per_s, "min_per_s": min_per_s, "coarse": True}
        found = await self._bench(replica, prepared, folder, self.workload.with_seed(seed), "climb", **rates)
        if found.interrupted:
            raise asyncio.CancelledError
        if all(map(inconclusive, found.levels)):
            raise InvalidMeasurement(
                f"no load level could be measured: {'; '.join(one.sentence for one in found.levels[-1].failed_guards)}",
                hint="stop other work on this machine, then rerun with --resume",
            )
        return found

    async def run_fixed_rate(
        self, replica: Replica, prepared: Prepared, folder: Path, *, rate_per_s: float, seed: int, blocks: int = 2
    ) -> Level:
        """Measure one rate, in blocks that each have enough requests for the SLO; a closed loop keeps its users."""
        workload = self.workload.with_seed(seed).at_rate_if_open(rate_per_s)
        found = await self._bench(replica, prepared, folder, workload, "level", blocks=blocks, stop_early=True)
        return found.levels[-1]

    async def run_closed_loop(
        self, replica: Replica, prepared: Prepared, folder: Path, *, users: int, requests: int
    ) -> Level:
        """Measure a number of concurrent users without think time."""
        found = await self._bench(
            replica, prepared, folder, self.workload.with_users(users), "level", amount=Amount(requests=requests)
        )
        return found.levels[-1]

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
            price_per_h=self.usd_per_h,
            command=f"powerband tune {self.model.source}",
            **{"amount": Amount(min_requests=self.requests), **more},
        )
        progress = bench.Progress(self.on_status, lambda level: self.report(f"{level.load}: {level.verdict}"))
        found = await bench.bench(replica, prepared, spec, directory=folder, stopping=self.stopping, progress=progress)
        (folder / "measurement.json").write_text(found.to_json())
        return found

    async def run_trial(
        self, number: int, settings: Settings, *, expected: Interval | None, best: Trial | None
    ) -> Trial:
        """Run one trial; a failure of the deployment is an outcome, not an exception."""
        began, limit = time.monotonic(), asyncio.timeout(self.timeout_s)
        excluded = ExcludedTime(limit)
        folder = self.folder / f"trial-{number:03d}"
        folder.mkdir(exist_ok=True)
        inputs: dict[str, Any] = {"number": number, "settings": settings, "expected_per_s": expected}
        try:
            async with limit:
                found = await self._run_trial(settings, folder, expected, best, excluded)
        except DeploymentRefused as error:
            found = {"outcome": "ruled out", "reason": error.message}
        except (EngineError, InputError) as error:
            found = {"outcome": "failed", "reason": _first_line(error)}
        except TimeoutError:
            found = {"outcome": "failed", "reason": f"timed out after {self.timeout_s / 60:.0f} min"}
        times = {"seconds": round(time.monotonic() - began, 1), "excluded_s": round(excluded.seconds, 1)}
        return Trial.model_validate(inputs | found | times | {"evidence": folder.name})

    async def _run_trial(
        self, settings: Settings, folder: Path, expected: Interval | None, best: Trial | None, excluded: ExcludedTime
    ) -> dict[str, Any]:
        known = self.quality_verdicts.get(key(self.space.quality_settings(settings)))
        if known and known.outcome == "below the floor":
            reason = f"same quality settings as trial {known.number}, which is below the floor"
            return {"outcome": "ruled out", "reason": reason}
        with excluded:
            prepared = local.prepare(await self.deployment(settings))
            if not known and (spec := self._quality_spec(quick=True)):
                await gate.ensure_reference_answers(await self.reference(), spec, progress=self._report_quality)
        self.report("start the engine")
        async with local.launch(
            prepared, directory=folder, ready_timeout_s=_READY_TIMEOUT_S, on_change=self._report_start
        ) as replica:
            with excluded:
                judged = None if known else await self.quick_quality_check(prepared, replica)
            quality: dict[str, Any] = {}
            if known:
                quality = {"quality": known.quality, "kl": known.kl, "passed": known.passed}
            elif judged:
                quality = {"quality": judged.verdict, "kl": _kl(judged)}
                if judged.verdict == "fail":
                    return quality | {"outcome": "below the floor", "reason": judged.reason}
            min_per_s = best.max_rate_per_s if best else None
            calibrated = expected is not None and expected.low > 0  # otherwise predictions rank, but have no scale
            start = min_per_s or (0.7 * expected.value if expected and calibrated else None)
            found = await self.climb(
                replica, prepared, folder, start_per_s=start, min_per_s=min_per_s, seed=self.workload.seed
            )
        if died := next((one.stopped_early for one in found.levels if "died" in (one.stopped_early or "")), None):
            return quality | {"outcome": "failed", "reason": died}
        rate = max_rate(found.levels)
        if rate is None:
            return quality | {"outcome": "too slow", "reason": _why_slow(found), "value": self._partial_value(found)}
        if min_per_s and rate > min_per_s and not quality.get("passed"):  # a new best needs the full quality check
            with excluded:
                failure = await self.full_quality_check(settings)
            quality["passed"] = not failure
            if failure:
                return quality | {"outcome": "below the floor", "reason": failure}
        level = found.levels[found.best] if found.best is not None else found.levels[0]
        shown = {f"{one.metric} {one.percentile}": one.value_s for one in level.slo_checks if one.value_s is not None}
        return quality | {
            "outcome": "feasible",
            "max_rate_per_s": rate,
            "value": self.value(rate),
            "latencies_s": shown,
        }

    def _report_start(self, replica: Replica, event: str) -> None:
        if event not in ("ready", "stopping", "stopped"):
            self.report(f"start the engine: {event}")

    def value(self, rate_per_s: float) -> float:
        """Return the objective: requests within the SLO per dollar."""
        return rate_per_s * 3600 / self.usd_per_h

    def _partial_value(self, found: Measurement) -> float:
        """Return the value of the goodput at the rates that miss the SLO: it tells the search how close it is."""
        rates = [one for one in found.levels if one.rate_per_s] or found.levels
        good = [one.goodput_per_s.value for one in rates if one.goodput_per_s]
        return self.value(0.9 * min(good, default=0.0))


class ExcludedTime:
    """Time spent on work that many trials share; it is summed, and does not count against the trial's timeout."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.seconds, self._limit = 0.0, limit

    def __enter__(self) -> None:
        self._began, self._due = time.monotonic(), self._limit.when()
        self._limit.reschedule(None)

    def __exit__(self, *_: object) -> None:
        spent_s = time.monotonic() - self._began
        self.seconds += spent_s
        self._limit.reschedule((self._due or 0.0) + spent_s)


def _kl(judged: Evaluation) -> float | None:
    return next((one.found.value for one in judged.figures if one.name == "kl_mean" and not one.kind), None)


def _why_slow(found: Measurement) -> str:
    """Return the load and latencies of the lowest load, which still misses the SLO."""
    if not found.levels:
        return "no load level was measured"
    lowest = found.levels[-1]  # concurrency 1, if that misses the SLO
    late = [
        f"{one.metric.upper()} {one.percentile} {one.value_s * 1e3:.0f} ms (limit {one.limit_s * 1e3:.0f} ms)"
        for one in lowest.slo_checks
        if one.value_s is not None and one.value_s > one.limit_s
    ]
    return f"{lowest.load}: {lowest.verdict}" + (f", {', '.join(late)}" if late else "")


def _first_line(error: PowerbandError) -> str:
    return error.message.splitlines()[0]
