"""Run one trial: build the variant, start the engine, estimate its max rate, and measure it if it could win.

A trial goes up rungs: the screen, two closed-loop levels that estimate the max rate; the quality check, if its estimate
is the highest; and a climb to its max rate, if the search chose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import powerband.evaluate as gate
from powerband import engines
from powerband import quantize as quantizing
from powerband.bench.profiles import LATENCY_STEEPNESS, log_excess, max_rate
from powerband.core.deployment import Deployment
from powerband.core.engine import StepProgress
from powerband.core.evaluation import Evaluation
from powerband.core.host import Host
from powerband.core.measurement import Measurement
from powerband.core.quality import QualityFloor
from powerband.core.study import ENGINE, Settings, Trial, render_settings
from powerband.errors import DeploymentRefused, EngineError, InputError, InvalidMeasurement, PowerbandError
from powerband.evaluate.probes import probes, reserve
from powerband.evaluate.tasks import Task
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.load.prompts import users
from powerband.runtime import devices
from powerband.runtime.replica import Replica
from powerband.store.schemes import published_scheme
from powerband.tune import runnable, screen
from powerband.tune.budget import Durations
from powerband.tune.device_pool import DevicePool
from powerband.tune.load_runner import LoadRunner
from powerband.tune.search import Step
from powerband.tune.search_space import WEIGHTS, Key, SearchSpace, key

HELD_OUT_SEED = 1_000_000  # workload seeds from here on generate requests that the search never uses
FIRST_PROBES = 0.25  # share of the probes that a running deployment is evaluated on
_MIN_TIMEOUT_S, _TIMEOUT_LEVELS = 1800.0, 3  # a trial times out after this long, or after this many load levels
_UNQUANTIZED = "f16"  # GGUF scheme that represents 16-bit weights without loss
label: ContextVar[str] = ContextVar("label", default="")  # what runs in this task, if others run beside it


class RunTrial(Protocol):
    """A function that runs one trial; None: the node that ran it is gone."""

    async def __call__(self, step: Step) -> Trial | None: ...


@dataclass(kw_only=True)
class TrialRunner(LoadRunner):
    """What all trials of a study share, and how to run one."""

    floor: QualityFloor | None
    space: SearchSpace
    folder: Path
    host: Host = field(default_factory=devices.this_host)
    parallel_trials: int = 1  # one on each node, or several on the devices of this machine
    pool: DevicePool | None = None  # the devices of trials that run side by side
    durations: Durations = field(default_factory=Durations)
    tasks: dict[str, Task] = field(default_factory=dict)
    traffic_tokens: int = 0  # of a long request with its answer
    quality_verdicts: dict[Key, Trial] = field(default_factory=dict)  # by the settings that can change answers
    now: Callable[[], float] = time.monotonic
    _reference: Prepared | None = None
    _building: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _before_s: float = 0.0  # spent on trials by earlier processes
    _began: float | None = None
    _build_s: float = 0.0

    @property
    def timeout_s(self) -> float:
        """Return the time limit of a trial."""
        return max(_MIN_TIMEOUT_S, _TIMEOUT_LEVELS * self.max_level_s) + local.start_timeout_s(self.model.weight_bytes)

    def remember_quality(self, trial: Trial) -> None:
        """Remember the quality verdict of a trial, for later trials with the same quality settings."""
        if trial.quality:  # a later trial has at least the verdicts of the earlier ones
            self.quality_verdicts[key(self.space.quality_settings(trial.settings))] = trial

    def begin_side_by_side(self, trials: Sequence[Trial], pool: DevicePool, count: int) -> None:
        """Run trials on this machine's devices at the same time; `trials` are those of earlier processes."""
        self.pool, self.parallel_trials = pool, count
        self._before_s = sum(one.seconds - one.excluded_s for one in trials) / count
        self._began = self.now()
        single, self.on_status = self.report, lambda _: None

        def labelled(message: str) -> None:
            single(f"{known}: {message}" if (known := label.get()) else message)

        self.report = labelled

    def elapsed_s(self, trials: Sequence[Trial]) -> float:
        """Return the wall-clock time that trials took, without the time that built variants."""
        if self._began is not None:
            return self._before_s + self.now() - self._began - self._build_s
        return sum(one.seconds - one.excluded_s for one in trials) / self.parallel_trials

    async def deployment(self, settings: Settings) -> Deployment[Any]:
        """Return the deployment with these settings; build its variant if it is not in the cache."""
        source, scheme = self.model.source, settings.get(WEIGHTS)
        if scheme and scheme != published_scheme(self.model).name:

            def on_step(step: StepProgress) -> None:
                if step.starts:
                    self.report(f"{scheme}: {step.title}")

            async with self._building:
                began = self.now()
                made = await quantizing.quantize(quantizing.QuantizeSpec(source, scheme), progress=on_step)
                self._build_s += self.now() - began
            source = str(made.path)
        data = self.space.document(settings, source)
        return engines.deployment_of(data | {"name": self.model.name, "variant": {"source": source, "scheme": scheme}})

    def devices(self, settings: Settings) -> int:
        """Return how many devices settings are expected to occupy; a CPU machine counts as one."""
        return runnable.devices(self.space, self.model, self.host, settings)

    def _reference_settings(self) -> Settings:
        published = published_scheme(self.model)
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

    def _quality_spec(self, settings: Settings, share: float) -> gate.EvaluateSpec | None:
        """Return the spec of the quality check; None: there is nothing to check."""
        floor = self.floor
        if floor is None or not (floor.fidelity or floor.tasks) or self.matches_reference(settings):
            return None
        first = probes(traffic_tokens=self.traffic_tokens)
        reserve_s = self.max_level_s / 2
        return gate.EvaluateSpec(floor, first, reserve(), reserve_s, self.tasks, share=share)

    async def ask_reference(self, settings: Settings, *, share: float = 1.0) -> None:
        """Get the reference's answers before a deployment starts whose quality is unknown."""
        if spec := self._quality_spec(settings, share):
            async with self._asking, self.holding(self.devices(self._reference_settings())):
                await gate.ensure_reference_answers(await self.reference(), spec, progress=self._report_quality)

    def holding(self, count: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold devices that other trials could take."""
        return self.pool.take(count) if self.pool else contextlib.nullcontext()

    async def quality_check(
        self, settings: Settings, running: tuple[Prepared, Replica] | None = None
    ) -> dict[str, Any]:
        """Evaluate a deployment and return the verdict as fields of a trial.

        A running one is evaluated on the first part of the probes: it gets the verdict of the whole check, or none yet.
        Otherwise it is started and evaluated until its verdict is clear; the validation does this with its finalists.
        """
        spec = self._quality_spec(settings, FIRST_PROBES if running else 1.0)
        if spec is None:
            return {"passed": True}
        self.report(f"quality check of {render_settings(settings, self.space.all_defaults)}")
        if not running:
            await self.ask_reference(settings)
        # A running deployment holds its memory, so it cannot be prepared again.
        prepared, replica = running or (local.prepare(await self.deployment(settings)), None)
        judged = await gate.evaluate(
            await self.reference(), prepared, spec, running=replica, progress=self._report_quality
        )
        found = {"quality": judged.verdict, "kl": _kl(judged), "passed": judged.verdict == "pass"}
        if found["passed"] or (running and judged.verdict == "undecided"):
            return found
        reason = judged.reason if judged.verdict == "fail" else f"{judged.verdict}: {judged.reason}"
        return found | {"outcome": "below the floor", "reason": reason}

    def _report_quality(self, message: str) -> None:
        self.report(f"quality: {message}")

    async def run_trial(self, step: Step) -> Trial:
        """Run one trial; a failure of the deployment is an outcome, not an exception."""
        label.set(f"trial {step.number}")
        began, limit = self.now(), asyncio.timeout(self.timeout_s)
        excluded = ExcludedTime(limit)
        folder = self.folder / f"trial-{step.number:03d}"
        folder.mkdir(exist_ok=True)
        before = step.before
        found: dict[str, Any] = {"number": step.number, "settings": step.settings, "expected_per_s": step.expected}
        if before:
            kept = ("estimate_per_s", "value", "latencies_s", "excess", "expected_per_s", "start_s")
            found |= {name: getattr(before, name) for name in kept}
            found["tries"] = before.tries + (before.outcome == "inconclusive")
        try:
            async with limit:
                await self._run_trial(step, folder, excluded, found)
        except DeploymentRefused as error:
            found |= {"outcome": "ruled out", "reason": error.message}
        except (EngineError, InputError) as error:
            found |= {"outcome": "failed", "reason": _first_line(error), "value": 0.0}
        except InvalidMeasurement as error:
            found |= {"outcome": "inconclusive", "reason": _first_line(error)}
        except TimeoutError:
            found |= {"outcome": "failed", "reason": f"timed out after {self.timeout_s / 60:.0f} min", "value": 0.0}
        spent_s, build_s = self.now() - began, excluded.seconds
        if before:
            spent_s, build_s = spent_s + before.seconds, build_s + before.excluded_s
        times = {"seconds": round(spent_s, 1), "excluded_s": round(build_s, 1)}
        return Trial.model_validate(found | times | {"evidence": folder.name})

    async def _run_trial(self, step: Step, folder: Path, excluded: ExcludedTime, found: dict[str, Any]) -> None:
        """Start the deployment and go up the rungs; what is found goes into `found`."""
        settings = step.settings
        known = self.quality_verdicts.get(key(self.space.quality_settings(settings)))
        if known and known.outcome == "below the floor":
            reason = f"same quality settings as trial {known.number}, which is below the floor"
            found |= {"outcome": "ruled out", "reason": reason}
            return
        with excluded:
            deployment = await self.deployment(settings)
        if not known:
            await self.ask_reference(settings, share=FIRST_PROBES)
        async with contextlib.AsyncExitStack() as stack:
            with excluded:
                await stack.enter_async_context(self.holding(self.devices(settings)))
            prepared = self.prepare(deployment)
            found["devices"] = prepared.devices
            self.report("start the engine")
            began = self.now()
            replica = await stack.enter_async_context(self.launch(prepared, folder, on_change=self._report_start))
            found["start_s"] = round(self.now() - began, 1)
            leads = step.climb or bool(users(self.workload))
            if not (found.get("estimate_per_s") or users(self.workload)):
                self._judge_screen(await self.measure_screen(replica, prepared, folder), found)
                if found["outcome"] != "screened":
                    return
                leads = leads or found["value"] > step.rival_value
            if known:
                found |= {"quality": known.quality, "kl": known.kl, "passed": known.passed}
            elif leads:  # degraded answers are found faster than a max rate
                found |= await self.quality_check(settings, (prepared, replica))
                if found.get("outcome") == "below the floor":
                    return
            if step.climb or users(self.workload) or (leads and found["start_s"] > 2 * self.durations.climb()):
                await self._climb_and_judge(step, replica, prepared, folder, found)

    def _judge_screen(self, points: Sequence[screen.Point], found: dict[str, Any]) -> None:
        """Estimate the max rate."""
        estimate = screen.estimate(points, self.slo)
        found |= {"excess": screen.excess(points[0], self.slo), "latencies_s": screen.shown(points[0], self.slo)}
        if estimate is None:
            found |= {"outcome": "too slow", "reason": f"1 user: {screen.late(points[0], self.slo)}"}
            found["value"] = self.value(points[0].rate_per_s / found["excess"], found["devices"])
        else:
            found |= {"outcome": "screened", "estimate_per_s": estimate}
            found["value"] = self.value(estimate.value, found["devices"])

    async def _climb_and_judge(
        self, step: Step, replica: Replica, prepared: Prepared, folder: Path, found: dict[str, Any]
    ) -> None:
        """Measure the max rate; a deployment that misses the SLO at the rate of the best trial is slower."""
        leader, count = step.best, found["devices"]
        min_per_s = leader.value * self.usd_per_h * count / 3600 if leader else None  # the same requests per dollar
        expected = found.get("estimate_per_s") or (step.expected if step.expected and step.expected.low > 0 else None)
        measured = await self.climb(
            replica,
            prepared,
            folder,
            start_per_s=min_per_s or (expected.value if expected else None),
            min_per_s=min_per_s,
            feasible=bool(found.get("estimate_per_s")),
            seed=self.workload.seed,
        )
        if died := next((one.stopped_early for one in measured.levels if "died" in (one.stopped_early or "")), None):
            found |= {"outcome": "failed", "reason": died, "value": 0.0}
            return
        rate = max_rate(measured.levels)
        if rate is None:
            outcome = "slower" if leader else "too slow"
            found |= {"outcome": outcome, "reason": _why_slow(measured)}
            found["value"] = self._value_of_missed(measured, count)
            return
        if min_per_s and rate <= min_per_s:  # a closed loop always has a rate
            reason = f"{rate:.3g} req/s; at the cost of the best so far it would be {min_per_s:.3g}"
            found |= {"outcome": "slower", "reason": reason, "value": self.value(rate, count)}
            return
        level = measured.levels[measured.best] if measured.best is not None else measured.levels[0]
        shown = {f"{one.metric} {one.percentile}": one.value_s for one in level.slo_checks if one.value_s is not None}
        found |= {"outcome": "feasible", "max_rate_per_s": rate, "latencies_s": shown}
        found["value"] = self.value(rate, count)

    def _report_start(self, replica: Replica, event: str) -> None:
        if event not in ("ready", "stopping", "stopped"):
            self.report(f"start the engine: {event}")

    def value(self, rate_per_s: float, devices: int) -> float:
        """Return the objective: requests within the SLO per dollar."""
        return rate_per_s * 3600 / (self.usd_per_h * devices)

    def _value_of_missed(self, found: Measurement, devices: int) -> float:
        """Return the value of the rate that a deployment may sustain, from how late it is at the rates that it misses.

        Latency grows steeply near the max rate: a latency of twice its bound is a rate about 20 % too high.
        """
        rates = [(one.rate_per_s or one.achieved_per_s, max(0.0, log_excess(one))) for one in found.levels]
        slowest = min((rate * math.exp(-over / LATENCY_STEEPNESS) for rate, over in rates), default=0.0)
        return self.value(slowest, devices)


class ExcludedTime:
    """Time spent on work that many trials share; it is summed, and does not count against the trial's timeout."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.seconds, self._limit, self._now = 0.0, limit, asyncio.get_running_loop().time

    def __enter__(self) -> None:
        self._began, self._due = self._now(), self._limit.when()
        self._limit.reschedule(None)

    def __exit__(self, *_: object) -> None:
        spent_s = self._now() - self._began
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
