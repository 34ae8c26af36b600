"""Studies in virtual time: the real search over configurations whose truth is recorded or made up.

A virtual runner answers what an engine would: how long it starts, what its closed-loop levels show, which latencies it
has at a rate. Everything above that is the code of `tune`: its search, its rungs, its climbs, its sequential tests. The
search of version 0.1 runs over the same truths, with the same random numbers, for comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import search_0_1

from powerband import tune
from powerband.bench import sequential
from powerband.bench.level_controller import Plan
from powerband.bench.profiles import Amount, climb, inconclusive, max_rate
from powerband.core.measurement import GRID, Distribution, Level, Measurement, SLOCheck, Timeline, Verdict
from powerband.core.model import Model
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import Settings, Trial, best
from powerband.core.workload import Workload
from powerband.errors import EngineFailed, InvalidMeasurement
from powerband.tune import budget, screen
from powerband.tune.search import Search, Step
from powerband.tune.search_space import Key, SearchSpace, key
from powerband.tune.spec import TuneSpec
from powerband.tune.trial_runner import TrialRunner

STEEPNESS = 4.0  # latency over its bound is (rate / max rate) ** STEEPNESS
LATENCY_SPREAD = 0.5  # of the latencies of one level, standard deviation of their logarithm
WARMUP_REQUESTS, MIN_WARMUP_S, MAX_WARMUP_S = 9, 2.0, 15.0
LIMIT_S = 1.0
SLO_90 = SLO.model_validate({"ttft": {"p90": LIMIT_S}})
WORKLOAD = Workload.model_validate(
    {
        "name": "replay",
        "arrivals": {"process": "poisson", "rate_per_s": 1},
        "prompt": {"shape": "fixed", "tokens": 10},
        "output": {"shape": "fixed", "tokens": 10},
    }
)


@dataclass(frozen=True)
class Truth:
    """What a configuration does."""

    max_rate_per_s: float  # 0: it misses the SLO at every rate
    start_s: float = 2.0
    expected_per_s: float | None = None  # the plan's prediction
    fails: bool = False  # it does not start
    degraded: bool = False  # its answers are below the quality floor
    estimate_per_s: float | None = None  # that its recorded screen gave; None: made up
    capacity: float = 1.0  # throughput of one user, of a configuration that misses the SLO


@dataclass(frozen=True)
class VirtualSpace:
    """A search space and its truths."""

    name: str
    space: SearchSpace
    truths: Mapping[Key, Truth]
    requests: int = 65
    gate: bool = False  # a quality floor is checked
    drift: float = 0.04  # of the machine from level to level, standard deviation of the logarithm
    screen_noise: float = 0.15  # of an estimate
    screen_bias: float = 1.2  # common to all estimates
    disturbed: float = 0.0  # share of the levels that a guard rejects

    @property
    def best(self) -> float:
        """Return the highest rate of a configuration that starts and keeps the floor."""
        return max(self.value(one) for one in self.space)

    def value(self, settings: Settings) -> float:
        """Return the rate of a configuration; 0 if it cannot win."""
        truth = self.truths[key(settings)]
        return 0.0 if truth.fails or (truth.degraded and self.gate) else truth.max_rate_per_s

    def expected(self, settings: Settings) -> Interval | None:
        """Return the plan's prediction, which ranks but has no bounds."""
        rate = self.truths[key(settings)].expected_per_s
        return None if rate is None else Interval(rate, 0.0, 1e9)


@dataclass
class Clock:
    """Virtual time."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


# What a check of quality took on the machine of ADR 10, in seconds: the quick check of version 0.1 (the reference, a
# candidate, a degraded candidate) and all probes of today's check.
QUICK_REFERENCE_S, QUICK_S, QUICK_FAIL_S = 48.0, 52.0, 12.0
REFERENCE_S, ALL_S = 168.0, 184.0
LEVEL_OVERHEAD_S = 1.5  # of each level: wait until the engine is idle, connect, analyse


@dataclass(kw_only=True)
class ReplayRunner(TrialRunner):
    """A runner of trials in virtual time."""

    virtual: VirtualSpace | None = None
    clock: Clock = field(default_factory=Clock)
    random: random.Random = field(default_factory=random.Random)
    decides: bool = True  # levels end when a sequential test knows their verdict
    settings: Settings = field(default_factory=dict)  # of the trial that runs
    referenced: float = 0.0  # share of the probes that the reference has answered

    def __post_init__(self) -> None:
        self.now = self.clock

    @property
    def truth(self) -> Truth:
        assert self.virtual
        return self.virtual.truths[key(self.settings)]

    async def deployment(self, settings: Settings) -> Any:
        self.settings = settings
        return SimpleNamespace(devices=1)

    def prepare(self, deployment: Any) -> Any:
        return deployment

    @contextlib.asynccontextmanager
    async def launch(self, *_: object, **__: object) -> AsyncIterator[Any]:
        self.clock.seconds += self.truth.start_s
        if self.truth.fails:
            raise EngineFailed("it does not start", hint="", failure="crash")
        yield None

    async def ask_reference(self, settings: Settings, *, share: float = 1.0) -> None:
        assert self.virtual
        if self.virtual.gate and self.space.non_default(self.space.quality_settings(settings)):
            self.clock.seconds += max(0.0, share - self.referenced) * REFERENCE_S
            self.referenced = max(self.referenced, share)

    async def quality_check(self, settings: Settings, running: object = None) -> dict[str, Any]:
        """Judge a degraded deployment on an eighth of the probes; every second other one needs more than a quarter."""
        assert self.virtual
        changed = self.space.non_default(self.space.quality_settings(settings))
        if not self.virtual.gate or not changed:
            return {"passed": True}
        degraded = self.virtual.truths[key(settings)].degraded
        hard = self.random.random() < 0.5
        if running and hard and not degraded:
            self.clock.seconds += ALL_S / 4
            return {"quality": "undecided", "passed": False}
        if not running:
            await self.ask_reference(settings)
            self.clock.seconds += self.virtual.truths[key(settings)].start_s
        self.clock.seconds += ALL_S / 8 if degraded else ALL_S / 4 if running else ALL_S / 2
        verdict = {"quality": "fail" if degraded else "pass", "passed": not degraded}
        return verdict | ({"outcome": "below the floor", "reason": "degraded"} if degraded else {})

    async def measure_screen(self, *_: object) -> list[screen.Point]:
        assert self.virtual
        truth, noise = self.truth, math.exp(self.random.gauss(0, self.virtual.screen_noise))
        factor = noise * self.virtual.screen_bias
        if truth.estimate_per_s and truth.max_rate_per_s:
            factor = truth.estimate_per_s / truth.max_rate_per_s * math.exp(self.random.gauss(0, 0.05))
        points = list(made_up_points(truth, factor))
        self.clock.seconds += LEVEL_OVERHEAD_S + 1.0 + 7 / points[0].rate_per_s
        if screen.excess(points[0], self.slo) > 1:
            return points[:1]
        for one in points[1:]:
            self.clock.seconds += LEVEL_OVERHEAD_S + (2 * one.users + max(24, 4 * one.users)) / one.rate_per_s
        return points

    async def climb(
        self,
        *_: object,
        start_per_s: float | None,
        seed: int,
        min_per_s: float | None = None,
        feasible: bool = False,
    ) -> Measurement:
        if start_per_s is None:  # a short closed-loop probe gives the start
            capacity = max(self.truth.max_rate_per_s, self.truth.capacity) * 1.3
            self.clock.seconds += 16 / capacity
            start_per_s = 0.7 * capacity
        min_per_s = max(min_per_s or 0.0, self.requests_per_level / self.max_level_s)
        amount = Amount(min_requests=self.requests, decide=self.decides)
        steps = climb(
            self.workload,
            self.slo,
            amount,
            start_per_s=start_per_s,
            min_per_s=min_per_s,
            coarse=True,
            feasible=feasible,
        )
        levels: list[Level] = []
        with contextlib.suppress(StopIteration):
            plan, _same = next(steps)
            while True:
                levels.append(self.level(plan))
                plan, _same = steps.send(levels[-1])
        if all(map(inconclusive, levels)):
            raise InvalidMeasurement("every level was disturbed", hint="")
        return Measurement(name="virtual", profile="climb", workload=self.workload, slo=self.slo, levels=tuple(levels))

    def level(self, plan: Plan) -> Level:
        """Return a level with latencies drawn for its rate, stopped as the level controller would stop it."""
        assert self.virtual
        rate, truth = plan.workload.rate_per_s, self.truth
        drift = math.exp(self.random.gauss(0, self.virtual.drift))
        disturbed = self.random.random() < self.virtual.disturbed
        if rate is None:  # concurrency 1
            met = truth.max_rate_per_s > 0
            self.clock.seconds += LEVEL_OVERHEAD_S + (3 if not met else plan.requests) / max(
                truth.capacity, truth.max_rate_per_s
            )
            return made_level(
                None, [0.5 if met else 2.0] * 20, met=met, early=None if met else "late", disturbed=disturbed
            )
        load = rate / (truth.max_rate_per_s * drift) if truth.max_rate_per_s else 10.0
        middle = math.log(LIMIT_S * load**STEEPNESS) - NormalDist().inv_cdf(0.9) * LATENCY_SPREAD
        latencies, late, early, decided = [], 0, None, None
        allowed = 0.1 * plan.requests + 1
        near = far = 0
        for number in range(1, plan.requests + 1):
            latencies.append(math.exp(self.random.gauss(middle, LATENCY_SPREAD)))
            late += latencies[-1] > LIMIT_S
            near += latencies[-1] > LIMIT_S / sequential.MARGIN
            far += latencies[-1] > LIMIT_S * sequential.MARGIN
            if late > allowed or (plan.decide and sequential.misses(far, number, plan.requests, 0.1)):
                early = "late"
            elif plan.decide and sequential.meets(near, number, plan.requests, 0.1):
                decided = "met"
            if early or decided:
                break
        warmup_s = min(MAX_WARMUP_S, max(MIN_WARMUP_S, WARMUP_REQUESTS / rate))
        self.clock.seconds += LEVEL_OVERHEAD_S + warmup_s + len(latencies) / rate
        share = 1 - late / len(latencies)
        return made_level(
            rate, latencies, met=share >= 0.9 and not early, early=early, decided=decided, disturbed=disturbed
        )


def made_up_points(truth: Truth, factor: float) -> Iterator[screen.Point]:
    """Yield two closed-loop levels whose estimate is the true max rate times a factor."""
    if not truth.max_rate_per_s:
        yield screen.Point(1, truth.capacity, {"ttft": 1.5 * LIMIT_S})
        return
    shape = [screen.Point(1, 1.0, {"ttft": 0.15 * LIMIT_S}), screen.Point(6, 1.6, {"ttft": 0.7 * LIMIT_S})]
    found = screen.estimate(shape, SLO_90)
    assert found
    for one in shape:
        yield replace(one, rate_per_s=one.rate_per_s * truth.max_rate_per_s * factor / found.value)


def made_level(
    rate: float | None,
    latencies: Sequence[float],
    *,
    met: bool,
    early: str | None = None,
    decided: str | None = None,
    disturbed: bool = False,
) -> Level:
    """Return a level with these latencies."""
    ordered = sorted(latencies)
    grid = tuple(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in GRID)
    mean = Interval(sum(ordered) / len(ordered), grid[0], grid[-1])
    share = Interval(0.95 if met else 0.5, 0.4, 1.0)
    check = SLOCheck(metric="ttft", percentile="p90", limit_s=LIMIT_S, value_s=grid[0], share=share, verdict="met")
    busy = (Verdict(guard="background load", valid=False, sentence="background load"),) if disturbed else ()
    return Level(
        rate_per_s=rate,
        users=None if rate else 1,
        seeds=(0,),
        warmup_s=1,
        window_s=10,
        requests=len(ordered),
        failed=0,
        achieved_per_s=rate or 1.0,
        slo_checks=(check,),
        prompt_tokens_per_s=1,
        output_tokens_per_s=1,
        tokens_per_chunk=1,
        latencies={"ttft": Distribution(count=len(ordered), effective=1, mean=mean, percentiles={}, grid=grid)},
        client={},
        timeline=Timeline(at_s=(), in_flight=()),
        verdicts=busy,
        stopped_early=early,
        decided=decided,
    )


class OldSearch(search_0_1.Search):
    """The search of version 0.1: defaults, one favourite of the plan, then proposals; every trial climbs."""

    def next(self, trials: Sequence[Trial], *, screen: bool = True) -> Step | None:  # type: ignore[override]
        settings = super().next(trials)
        leader = best(trials) if settings and self.space.non_default(settings) else None
        return Step(len(trials) + 1, settings, self.expectation(settings), leader, climb=True) if settings else None


class OldRunner(ReplayRunner):
    """A trial of version 0.1: a start, a quick quality check, a climb, and the full check of a new best."""

    quick_referenced = False

    async def run_trial(self, step: Step) -> Trial:
        assert self.virtual
        began, truth = self.clock(), self.virtual.truths[key(step.settings)]
        self.settings = step.settings
        found: dict[str, Any] = {"number": step.number, "settings": step.settings, "outcome": "too slow"}
        known = self.quality_verdicts.get(key(self.space.quality_settings(step.settings)))
        if known and known.outcome == "below the floor":
            return Trial.model_validate(found | {"outcome": "ruled out"})
        unknown = self.virtual.gate and not known
        if unknown:
            self.clock.seconds += 0.0 if self.quick_referenced else truth.start_s + QUICK_REFERENCE_S
            self.quick_referenced = True
        self.clock.seconds += truth.start_s
        if truth.fails:
            found |= {"outcome": "failed"}
        elif unknown and truth.degraded:
            self.clock.seconds += QUICK_FAIL_S
            found |= {"outcome": "below the floor", "quality": "fail"}
        else:
            self.clock.seconds += QUICK_S if unknown else 0.0
            rate_to_beat = step.best.max_rate_per_s if step.best else None
            levels = (await self.climb(start_per_s=rate_to_beat, min_per_s=rate_to_beat, seed=0)).levels
            rate = max_rate(levels)
            found |= {"value": 0.0}
            if rate:
                changed = self.space.non_default(self.space.quality_settings(step.settings))
                checked = not self.virtual.gate or not changed or (known and known.passed)
                if rate_to_beat and rate > rate_to_beat and not checked:
                    self.clock.seconds += ALL_S / 2 + truth.start_s + (1 - self.referenced) * REFERENCE_S
                    self.referenced = 1.0
                    found["passed"] = True
                found |= {"outcome": "feasible", "max_rate_per_s": rate, "value": self.value(rate, 1)}
                found |= {"quality": "pass"} if self.virtual.gate else {}
            else:
                good = [one.rate_per_s * 0.5 for one in levels if one.rate_per_s]
                found["value"] = self.value(0.9 * min(good, default=0.0), 1)
        return Trial.model_validate(found | {"seconds": self.clock() - began})


@dataclass
class Replayed:
    """A replayed search: its trials, and after each the share of the best rate that its better finalist has.

    The validation measures both finalists in interleaved rounds and takes the better one.
    """

    trials: list[Trial]
    progress: list[tuple[float, float]]  # (engine seconds, share of the best)

    def seconds_until(self, share: float) -> float:
        """Return when a finalist has a share of the best rate and keeps it; infinite if never."""
        found = math.inf
        for seconds, reached in reversed(self.progress):
            if reached < share:
                break
            found = seconds
        return found

    @property
    def final(self) -> float:
        return self.progress[-1][1] if self.progress else 0.0


def finalists_of(search: Any, trials: Sequence[Trial]) -> list[Trial]:
    """Return what the study would validate if it ended now: its two best trials, and those that would still climb."""
    feasible = sorted((one for one in trials if one.outcome == "feasible"), key=lambda one: -one.value)
    climbing = search.finalists(trials) if isinstance(search, Search) else []
    return feasible[:2] + [one for one in climbing if one.outcome == "screened"]


def virtual_runner(
    virtual: VirtualSpace, folder: Path, *, seed: int, budget_s: float, old: bool = False
) -> ReplayRunner:
    """Return a runner of trials in virtual time, of this version or of 0.1."""
    kind = OldRunner if old else ReplayRunner
    runner = kind(
        model=Model(source="virtual"),
        workload=WORKLOAD,
        slo=SLO_90,
        floor=None,
        space=virtual.space,
        folder=folder,
        usd_per_h=1.0,
        requests=virtual.requests,
        max_level_s=0.1 * budget_s if old else 0.2 * budget_s,
        virtual=virtual,
        random=random.Random(seed),
        decides=not old,
    )
    runner.durations = durations_of(virtual)
    return runner


def replay(virtual: VirtualSpace, *, seed: int, budget_s: float, old: bool = False) -> Replayed:
    """Run a search in virtual time."""
    spec = TuneSpec("virtual", WORKLOAD, SLO_90, requests=virtual.requests, budget_s=budget_s, seed=seed)
    found = Replayed([], [])
    with tempfile.TemporaryDirectory() as folder:
        runner = virtual_runner(virtual, Path(folder), seed=seed, budget_s=budget_s, old=old)
        made = OldSearch if old else Search
        search: Any = made(virtual.space, expected=virtual.expected, seed=seed)

        def on_trials(trials: Sequence[Trial]) -> None:
            if trials:
                chosen = finalists_of(search, trials)
                share = max((virtual.value(one.settings) for one in chosen), default=0.0) / virtual.best
                climbs_s = sum(one.start_s + runner.durations.climb() for one in chosen if one.outcome == "screened")
                found.progress.append((runner.elapsed_s(trials) + climbs_s, share))

        progress = tune.Progress(on_trials=on_trials)
        found.trials = asyncio.run(tune.search_trials(spec, runner, search, progress, [runner.run_trial]))
    return found


def durations_of(virtual: VirtualSpace) -> budget.Durations:
    """Return the durations that a study predicts for a virtual space, from its defaults."""
    defaults = {engine: virtual.truths[key(virtual.space.defaults(engine))] for engine in virtual.space.by_engine}
    rate = max((one.max_rate_per_s for one in defaults.values()), default=0.0) or 1.0
    return budget.Durations(
        requests=virtual.requests,
        starts_s={engine: one.start_s for engine, one in defaults.items()},
        best_per_s=rate,
        default_per_s=rate,
        gate_s=REFERENCE_S + ALL_S if virtual.gate else 0.0,
        configurations=len(virtual.space),
    )
