"""Profiles: generators that yield the next load to measure and receive the resulting level."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from powerband.bench import guards
from powerband.bench.level_controller import Plan
from powerband.core import statistics
from powerband.core.measurement import GRID, Level
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.load import prompts

_SPARE = 1.5  # samples relative to the minimum of the highest percentile
_MIN_WINDOW_S, _MIN_SHORT_WINDOW_S = 10.0, 3.0
_BRACKET, _COARSE_BRACKET = 1.1, 1.5  # a climb ends when lowest missed / highest met rate is at most this
_STEP, _COARSE_STEP = 1.5, 1.5
_STEP_GROWTH = 1.5  # exponent by which a coarse climb's steps grow: its start may be far from the maximum
_OVERSHOOT, _MIN_STEP = 1.25, 1.3  # of a coarse climb's step beyond the rate where a level says the maximum is
LATENCY_STEEPNESS = 3.0  # growth of a percentile near the max rate, in units of the growth of the rate
_MAX_TRIES = 3
_REQUESTS_PER_USER = 2  # of a closed loop, at least
_MIN_LOG_DISTANCE, _MAX_LOG_DISTANCE = 0.02, 1.5  # of a percentile from its bound
_MAX_STEPS = 12
_CONCURRENCY_1_REQUESTS = 20  # if these are late at concurrency 1, so are requests at any rate


@dataclass(frozen=True)
class Amount:
    """How much to measure at each level."""

    window_s: float | None = None
    requests: int | None = None
    max_window_s: float | None = None  # of a closed loop, which then ends with fewer requests
    min_requests: int | None = None  # instead of the default; more if the window would be too short
    seed: int | None = None
    decide: bool = False  # end a level as soon as a sequential test knows its verdict

    def plan(self, workload: Workload, slo: SLO | None, *, block: int = 0, stop_early: bool = False) -> Plan:
        """Return the plan for a load; every block has its own seed."""
        seed = (self.seed if self.seed is not None else workload.seed) + block
        workload, rate = workload.with_seed(seed), workload.rate_per_s
        if rate is None:  # a closed loop: its rate is not known in advance
            by_count = self.requests is not None and self.window_s is None
            requests = self.requests or max(200, 4 * prompts.users(workload))
            return Plan(
                workload, self.window_s or _MIN_WINDOW_S, requests, stop_early, by_count, max_window_s=self.max_window_s
            )
        if self.window_s is not None:
            return Plan(workload, self.window_s, max(1, round(rate * self.window_s)), stop_early)
        min_requests = self.min_requests or requests_needed(slo)
        requests = self.requests or max(min_requests, math.ceil(rate * self._min_window_s(slo)))
        return Plan(workload, requests / rate, requests, stop_early, by_count=True, decide=self.decide and stop_early)

    def _min_window_s(self, slo: SLO | None) -> float:
        """Return the minimum window; with `min_requests`, it may be as short as ten times the longest SLO bound."""
        bounds = slo.bounds() if slo and self.min_requests else ()
        limits = [limit for metric, _, limit in bounds if metric in ("ttft", "e2e")]
        return min(_MIN_WINDOW_S, max(_MIN_SHORT_WINDOW_S, 10 * max(limits))) if limits else _MIN_WINDOW_S


def requests_needed(slo: SLO | None) -> int:
    """Return the number of requests for the SLO's highest percentile (p95 without an SLO), with a margin."""
    return math.ceil(statistics.min_samples(slo.highest_percentile if slo else 0.95) * _SPARE)


Steps = Generator[tuple[Plan, bool], Level, None]  # yields a plan, and whether it is another block of the last level


def one_level(workload: Workload, slo: SLO | None, amount: Amount, *, blocks: int, stop_early: bool = False) -> Steps:
    """Measure the workload at its own load."""
    for block in range(blocks):
        level = yield amount.plan(workload, slo, block=block, stop_early=stop_early), block > 0
        if level.stopped_early:
            return


def sweep(workload: Workload, slo: SLO | None, amount: Amount, *, rates: Sequence[float], blocks: int) -> Steps:
    """Measure a list of rates."""
    number = 0
    for rate in rates:
        for block in range(blocks):
            yield amount.plan(workload.at_rate(rate), slo, block=number), block > 0
            number += 1


def climb(
    workload: Workload,
    slo: SLO,
    amount: Amount,
    *,
    start_per_s: float,
    blocks: int = 1,
    min_per_s: float = 0.0,
    coarse: bool = False,
    feasible: bool = False,
) -> Steps:
    """Find the highest rate that meets the SLO: step up until it is missed, bisect the bracket, confirm the result.

    A coarse climb takes smaller steps, stops at a wider bracket and confirms nothing; `max_rate` interpolates its
    result. If the first rate misses the SLO, the climb measures concurrency 1 and ends if that misses the SLO too,
    unless the deployment is known to be `feasible` at some rate. Levels that a guard rejects decide nothing: the climb
    ends if a rate cannot be measured.
    """
    number = 0
    met, missed = 0.0, math.inf
    rate, step, bracket = start_per_s, *((_COARSE_STEP, _COARSE_BRACKET) if coarse else (_STEP, _BRACKET))

    def plan(rate: float, *, longer: int = 1) -> Plan:
        nonlocal number
        number += 1
        short = amount.plan(workload.at_rate(rate), slo, block=number - 1, stop_early=True)
        return replace(short, window_s=short.window_s * longer, requests=short.requests * longer)

    while number < _MAX_STEPS and missed > met * bracket and missed > min_per_s:
        for _ in range(_MAX_TRIES):
            level = yield plan(rate), False
            if not inconclusive(level):
                break
        else:
            return
        if meets_slo(level):
            met = rate
        else:
            missed = rate
            if rate == start_per_s and rate > min_per_s and not feasible:
                check = replace(amount, requests=_CONCURRENCY_1_REQUESTS, window_s=None)
                level = yield check.plan(workload.with_users(1), slo, block=_MAX_STEPS * 2, stop_early=True), False
                if level.stopped_early and not inconclusive(level):
                    return
        if met and not math.isinf(missed):
            rate = math.sqrt(met * missed)
        else:
            beyond = _beyond(level, step) if coarse else step
            rate = met * beyond if met else max(missed / beyond, min_per_s)
            step **= _STEP_GROWTH if coarse else 1.0
    while met and not coarse and number < 2 * _MAX_STEPS:
        for block in range(blocks):
            level = yield plan(met, longer=2), block > 0
        if meets_slo(level):
            return
        if not inconclusive(level):
            met /= _BRACKET


def closed_loop(workload: Workload, slo: SLO, amount: Amount) -> Steps:
    """Measure a closed-loop workload with its own users; more requests if the window was too short."""
    requests = max(amount.min_requests or requests_needed(slo), _REQUESTS_PER_USER * prompts.users(workload))
    for block in range(_MAX_TRIES):
        level = yield replace(amount, requests=requests).plan(workload, slo, block=block, stop_early=True), False
        longer = math.ceil(level.achieved_per_s * _MIN_WINDOW_S)
        if not inconclusive(level) and longer <= requests * _BRACKET:
            return
        requests = max(requests, longer)


def max_rate(levels: Sequence[Level]) -> float | None:
    """Return the maximum rate within the SLO, between the highest rate that meets it and the lowest that misses it.

    The distances of the two levels from the SLO bounds give the point between them. If the higher level is within the
    bounds but answers more slowly than requests arrive, and in a closed loop, the result is the rate of answers. If it
    was stopped early while its queue grew, its latencies say nothing about the distance, and the result is the
    geometric mean. None if no level meets the SLO.
    """
    if all(one.users for one in levels):
        answered = [one.achieved_per_s for one in levels if meets_slo(one)]
        return answered[-1] if answered else None
    misses = [one for one in levels if one.rate_per_s and not (meets_slo(one) or inconclusive(one))]
    missed = min(misses, key=lambda one: one.rate_per_s or 0.0, default=None)
    missed_per_s = (missed.rate_per_s or 0.0) if missed else math.inf
    met = max(
        (one for one in levels if meets_slo(one) and (one.rate_per_s or 0.0) < missed_per_s),
        key=lambda one: one.rate_per_s or 0.0,
        default=None,
    )
    if met is None or met.rate_per_s is None:
        return None
    if missed is None or missed.rate_per_s is None:
        return met.rate_per_s
    if missed.stopped_early and "overload" in _failed_guards(missed):
        return math.sqrt(met.rate_per_s * missed.rate_per_s)
    below, above = min(log_excess(met), -_MIN_LOG_DISTANCE), log_excess(missed)
    if above <= 0:
        return min(max(missed.achieved_per_s, met.rate_per_s), missed.rate_per_s)
    part = below / (below - max(above, _MIN_LOG_DISTANCE))
    return met.rate_per_s * math.exp(part * math.log(missed.rate_per_s / met.rate_per_s))


def _beyond(level: Level, step: float) -> float:
    """Return the factor to a rate just beyond the maximum, from how far a level is from its SLO bounds."""
    distance = math.exp(abs(log_excess(level)) / LATENCY_STEEPNESS)
    return min(step, max(_MIN_STEP, distance * _OVERSHOOT))


def log_excess(level: Level, *, budget_share: float = 1.0) -> float:
    """Return log(percentile / bound) of the worst SLO check, negative if all bounds are met.

    With a share of the error budget, the percentiles are those that leave the rest of the budget. It uses the stored
    quantile function, because a level that was stopped early has too few samples for a percentile.
    """
    found = [0.0] if not level.slo_checks else []
    for one in level.slo_checks:
        index = bisect_left(GRID, 1 - budget_share * (1 - float(one.percentile[1:]) / 100))
        found.append(math.log(max(level.latencies[one.metric].grid[index], 1e-6) / one.limit_s))
    return min(max(found), _MAX_LOG_DISTANCE)


def inconclusive(level: Level) -> bool:
    """Return whether a disturbance of the measurement makes a level unusable as a result for its load."""
    failed = _failed_guards(level)
    # A closed loop cannot be overloaded, so a drift there is a disturbance.
    faults = guards.MEASUREMENT_FAULTS | ({"steady state"} if level.users else set())
    return bool(failed) and failed <= faults


def meets_slo(level: Level) -> bool:
    """Return whether a level is valid and meets the SLO: complete, or decided by a sequential test."""
    return level.meets_slo and not _failed_guards(level) and not level.stopped_early


def _failed_guards(level: Level) -> set[str]:
    """Return the guards that failed, without those that a window which was cut short cannot pass."""
    failed = {one.guard for one in level.failed_guards}
    return failed - {"sample size", "steady state"} if level.stopped_early or level.decided else failed


def sustains(level: Level, rate_per_s: float) -> bool:
    """Return whether a level proves that the SLO is met at a rate; a closed loop must also answer at that rate."""
    return meets_slo(level) and (not level.users or level.achieved_per_s >= rate_per_s)
