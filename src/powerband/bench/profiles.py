"""Profiles: a generator that yields the next load to hold and is sent what came of it."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from powerband.bench import guards
from powerband.bench.level import Plan
from powerband.core import statistics
from powerband.core.measurement import Level
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.load import prompts

_SPARE = 1.5  # samples beyond what the highest percentile needs
_LEAST_WINDOW_S = 10.0
_CLOSE = 1.1  # the climb ends when the lowest rate that breaks is this near to the highest that holds
_STEP = 1.5
_TRIES = 3
_LARGEST_STEPS = 12


@dataclass(frozen=True)
class Amount:
    """How much to measure at each level."""

    window_s: float | None = None
    requests: int | None = None
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
        requests = self.requests or max(enough(slo), math.ceil(rate * _LEAST_WINDOW_S))
        return Plan(workload, requests / rate, requests, hopeless, counted=True)


def enough(slo: SLO | None) -> int:
    """Return how many requests the SLO's highest percentile needs, with some to spare; p95 without an SLO."""
    return math.ceil(statistics.needed(slo.highest if slo else 0.95) * _SPARE)


Steps = Generator[tuple[Plan, bool], Level, None]  # the plan; whether it is another block of the last level


def one_level(workload: Workload, slo: SLO | None, amount: Amount, *, blocks: int) -> Steps:
    """Hold the workload's own load."""
    for block in range(blocks):
        yield amount.plan(workload, slo, block=block), block > 0


def sweep(workload: Workload, slo: SLO | None, amount: Amount, *, rates: Sequence[float], blocks: int) -> Steps:
    """Hold one rate after another."""
    number = 0
    for rate in rates:
        for block in range(blocks):
            yield amount.plan(workload.at_rate(rate), slo, block=number), block > 0
            number += 1


def climb(workload: Workload, slo: SLO, amount: Amount, *, start_per_s: float, blocks: int) -> Steps:
    """Find the highest rate that keeps the SLO: step up until it breaks, halve the bracket, confirm the answer."""
    number = 0
    holds, breaks = 0.0, math.inf
    rate = start_per_s

    def plan(rate: float, *, longer: int = 1) -> Plan:
        nonlocal number
        number += 1
        short = amount.plan(workload.at_rate(rate), slo, block=number - 1, hopeless=True)
        return replace(short, window_s=short.window_s * longer, requests=short.requests * longer)

    while number < _LARGEST_STEPS and breaks > holds * _CLOSE:
        for _ in range(_TRIES):
            level = yield plan(rate), False
            if not troubled(level):
                break
        if keeps(level):
            holds = rate
        else:
            breaks = rate
        if holds and math.isinf(breaks):
            rate = holds * _STEP
        elif not holds:
            rate = breaks / _STEP
        else:
            rate = math.sqrt(holds * breaks)
    while holds and number < 2 * _LARGEST_STEPS:
        for block in range(blocks):
            level = yield plan(holds, longer=2), block > 0
        if keeps(level):
            return
        if not troubled(level):
            holds /= _CLOSE


def troubled(level: Level) -> bool:
    """Tell whether a level says nothing about its load, because something disturbed the measuring."""
    refused = {one.guard for one in level.refused}
    if level.stopped_early:  # its window was cut short
        refused -= {"sample size", "steady state"}
    return bool(refused) and refused <= guards.TROUBLE


def keeps(level: Level) -> bool:
    """Tell whether a level held and may be believed; too much load is an answer here, not a fault."""
    return level.keeps_slo and level.valid and not level.stopped_early
