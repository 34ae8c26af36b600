"""Profiles: a generator that yields the next load to hold and is sent what came of it."""

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

_SPARE = 1.5  # samples beyond what the highest percentile needs
_LEAST_WINDOW_S, _SHORTEST_WINDOW_S = 10.0, 3.0
_CLOSE, _ROUGHLY = 1.1, 1.301  # the climb ends when the lowest rate that breaks is this near to the highest that holds
_STEP, _SMALL_STEP, _LONGER = (
    1.5,
    1.3,
    1.5,
)  # a rough climb's steps become longer: it may have been told to start far away
_TRIES = 3
_EACH = 2  # requests of each user of a crowd, at least
_NEAR, _FAR = 0.02, 1.5  # how far from its bound a percentile may count to be, as a logarithm
_LARGEST_STEPS = 12
_ALONE = 20  # requests, one at a time: what is late even so is late at any rate


@dataclass(frozen=True)
class Amount:
    """How much to measure at each level."""

    window_s: float | None = None
    requests: int | None = None
    least: int | None = None  # requests; more where they would not show a queue that grows
    seed: int | None = None

    def plan(self, workload: Workload, slo: SLO | None, *, block: int = 0, hopeless: bool = False) -> Plan:
        """Return the plan for a load; every block has requests of its own."""
        seed = (self.seed if self.seed is not None else workload.seed) + block
        workload, rate = workload.with_seed(seed), workload.rate_per_s
        if rate is None:  # a closed loop: nobody knows its rate beforehand
            counted = self.requests is not None and self.window_s is None
            requests = self.requests or max(200, 4 * prompts.users(workload))
            return Plan(workload, self.window_s or _LEAST_WINDOW_S, requests, hopeless, counted)
        if self.window_s is not None:
            return Plan(workload, self.window_s, max(1, round(rate * self.window_s)), hopeless)
        requests = self.requests or max(self.least or enough(slo), math.ceil(rate * self._least_window_s(slo)))
        return Plan(workload, requests / rate, requests, hopeless, counted=True)

    def _least_window_s(self, slo: SLO | None) -> float:
        """Return how long to look at least; where little is asked for, ten times as long as anyone waits."""
        bounds = slo.bounds() if slo and self.least else ()
        waits = [limit for metric, _, limit in bounds if metric in ("ttft", "e2e")]
        return min(_LEAST_WINDOW_S, max(_SHORTEST_WINDOW_S, 10 * max(waits))) if waits else _LEAST_WINDOW_S


def enough(slo: SLO | None) -> int:
    """Return how many requests the SLO's highest percentile needs, with some to spare; p95 without an SLO."""
    return math.ceil(statistics.needed(slo.highest if slo else 0.95) * _SPARE)


Steps = Generator[tuple[Plan, bool], Level, None]  # the plan; whether it is another block of the last level


def one_level(workload: Workload, slo: SLO | None, amount: Amount, *, blocks: int, hopeless: bool = False) -> Steps:
    """Hold the workload's own load; where it is hopeless, no longer than it takes to see that."""
    for block in range(blocks):
        level = yield amount.plan(workload, slo, block=block, hopeless=hopeless), block > 0
        if level.stopped_early:
            return


def sweep(workload: Workload, slo: SLO | None, amount: Amount, *, rates: Sequence[float], blocks: int) -> Steps:
    """Hold one rate after another."""
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
    least_per_s: float = 0.0,
    rough: bool = False,
) -> Steps:
    """Find the highest rate that keeps the SLO: step up until it breaks, halve the bracket, confirm the answer.

    A rough climb takes small steps from where it is told to start, and confirms nothing: `knee` tells what it found.
    Where the first rate breaks, requests are asked one at a time: what is late even so need not be asked more slowly.
    """
    number = 0
    holds, breaks = 0.0, math.inf
    rate, step, close = start_per_s, *((_SMALL_STEP, _ROUGHLY) if rough else (_STEP, _CLOSE))

    def plan(rate: float, *, longer: int = 1) -> Plan:
        nonlocal number
        number += 1
        short = amount.plan(workload.at_rate(rate), slo, block=number - 1, hopeless=True)
        return replace(short, window_s=short.window_s * longer, requests=short.requests * longer)

    while number < _LARGEST_STEPS and breaks > holds * close and breaks > least_per_s:
        for _ in range(_TRIES):
            level = yield plan(rate), False
            if not inconclusive(level):
                break
        if meets_slo(level):
            holds = rate
        else:
            breaks = rate
            if rate == start_per_s and rate > least_per_s:
                alone = replace(amount, requests=_ALONE, window_s=None)
                level = yield alone.plan(workload.with_users(1), slo, block=_LARGEST_STEPS * 2, hopeless=True), False
                if level.stopped_early and not inconclusive(level):
                    return
        if holds and not math.isinf(breaks):
            rate = math.sqrt(holds * breaks)
        else:
            rate = holds * step if holds else breaks / step
            step **= _LONGER if rough else 1.0
    while holds and not rough and number < 2 * _LARGEST_STEPS:
        for block in range(blocks):
            level = yield plan(holds, longer=2), block > 0
        if meets_slo(level):
            return
        if not inconclusive(level):
            holds /= _CLOSE


def closed_loop(workload: Workload, slo: SLO, amount: Amount) -> Steps:
    """Let the workload's own users ask, who wait for their answers: no load is higher than what they are answered."""
    requests = max(amount.least or enough(slo), _EACH * prompts.users(workload))
    for block in range(_TRIES):
        level = yield replace(amount, requests=requests).plan(workload, slo, block=block, hopeless=True), False
        longer = math.ceil(level.achieved_per_s * _LEAST_WINDOW_S)
        if not inconclusive(level) and longer <= requests * _CLOSE:
            return
        requests = max(requests, longer)


def max_rate(levels: Sequence[Level]) -> float | None:
    """Return where the SLO just holds, between the highest load that keeps it and the lowest that breaks it.

    How far the two are from the bounds says where between them. A load that is answered more slowly than it comes, and
    yet within the bounds, says what is answered; so do users who wait for their answers. None where no load keeps it.
    """
    if all(one.users for one in levels):
        answered = [one.achieved_per_s for one in levels if meets_slo(one)]
        return answered[-1] if answered else None
    broken = [one for one in levels if one.rate_per_s and not (meets_slo(one) or inconclusive(one))]
    beyond = min(broken, key=lambda one: one.rate_per_s or 0.0, default=None)
    most = (beyond.rate_per_s or 0.0) if beyond else math.inf
    within = max(
        (one for one in levels if meets_slo(one) and (one.rate_per_s or 0.0) < most),
        key=lambda one: one.rate_per_s or 0.0,
        default=None,
    )
    if within is None or within.rate_per_s is None:
        return None
    if beyond is None or beyond.rate_per_s is None:
        return within.rate_per_s
    below, above = min(_beyond(within), -_NEAR), _beyond(beyond)
    if above <= 0:
        return min(max(beyond.achieved_per_s, within.rate_per_s), beyond.rate_per_s)
    part = below / (below - max(above, _NEAR))
    return within.rate_per_s * math.exp(part * math.log(beyond.rate_per_s / within.rate_per_s))


def _beyond(level: Level) -> float:
    """Return by how much the worst percentile exceeds its bound, as a logarithm; below nothing where all are kept.

    A level that was stopped early has too few answers to tell a percentile, and enough to tell how late they are.
    """
    found = [0.0] if not level.slo_checks else []
    for one in level.slo_checks:
        place = bisect_left(GRID, float(one.percentile[1:]) / 100)
        found.append(math.log(max(level.latencies[one.metric].grid[place], 1e-6) / one.limit_s))
    return min(max(found), _FAR)


def inconclusive(level: Level) -> bool:
    """Tell whether a level says nothing about its load, because something disturbed the measuring."""
    refused = {one.guard for one in level.refused}
    if level.stopped_early:  # its window was cut short
        refused -= {"sample size", "steady state"}
    trouble = guards.TROUBLE | ({"steady state"} if level.users else set())  # who ask no more than they are answered
    return bool(refused) and refused <= trouble


def meets_slo(level: Level) -> bool:
    """Tell whether a level held and may be believed; too much load is an answer here, not a fault."""
    return level.meets_slo and level.valid and not level.stopped_early


def sustains(level: Level, rate_per_s: float) -> bool:
    """Tell whether a level proves a promised rate: users who wait are to be answered at that rate, too."""
    return meets_slo(level) and (not level.users or level.achieved_per_s >= rate_per_s)
