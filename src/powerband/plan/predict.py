"""How fast an option is: a fluid estimate for every one, a simulation for those that could win."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from powerband.core import statistics
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.plan.closed_loop import SteadyState, steady_state
from powerband.plan.options import Lengths, Option
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_time import StepTimes

_ROUNDS = 7
_CLOSE = 1.04
_BEYOND = 1.25  # steps that read prompts and write tokens at once may carry more than a steady flow
_LEAST, _ANSWERS = 240, 6  # a play lasts for so many requests, and for so many answers one after another
_WARM = 3  # its first third is not counted
_GROWING = 3.0  # a queue whose last request waits so much longer than the promise grows


@dataclass(frozen=True)
class Requests:
    """The workload's requests at one per second: due times are stretched to any rate."""

    due: Sequence[float]
    prompts: Sequence[int]
    outputs: Sequence[int]
    lengths: Lengths


@dataclass(frozen=True)
class Fluid:
    """What a steady flow of average requests gives: quick, and without percentiles."""

    rate_per_s: float
    answer_s: float
    prefill_share: float  # of the time
    limited_by: str


@dataclass(frozen=True)
class Server:
    """A deployment as the simulation knows it: how long its steps take, and what its scheduler allows."""

    times: StepTimes
    limits: Limits


def server(option: Option, coefficients: Coefficients) -> Server:
    """Return what an option amounts to."""
    groups, drafting = option.split.data, option.drafting
    limits = Limits(
        sequences=option.choice.sequences * groups,
        batched_tokens=option.choice.batched_tokens * groups,
        kv_tokens=option.memory.kv_cache / option.memory.kv_per_token * groups,
        request_s=coefficients.request_s,
        tokens_per_step=drafting.per_step,
    )
    return Server(StepTimes(option.steps, option.offer.device, coefficients, drafting=drafting), limits)


def fluid(on: Server, lengths: Lengths, slo: SLO) -> Fluid:
    """Return the highest steady rate whose mean time per token keeps the SLO."""
    limit = min((seconds for metric, _, seconds in slo.bounds() if metric in ("tpot", "itl")), default=math.inf)
    room = on.limits.kv_tokens / lengths.held
    most = max(1.0, min(float(on.limits.sequences), room))
    low, high = 1.0, most
    if closed_loop(on.times, high, lengths).tpot_s > limit:
        for _ in range(12):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if closed_loop(on.times, middle, lengths).tpot_s <= limit else (low, middle)
        high = low
    found = closed_loop(on.times, high, lengths)
    bound = (
        "the SLO" if high < most else "memory for the KV cache" if room < on.limits.sequences else "the batch's size"
    )
    return Fluid(
        rate_per_s=high / (lengths.output * found.tpot_s),
        answer_s=lengths.output * found.tpot_s,
        prefill_share=1 - found.writing_s / on.limits.tokens_per_step / found.tpot_s,
        limited_by=bound,
    )


def closed_loop(times: StepTimes, users: float, lengths: Lengths) -> SteadyState:
    """Return what so many users who never pause would get of average requests."""
    known = lengths.prompt * lengths.known_share
    return steady_state(times, users=users, prompt=lengths.prompt, output=lengths.output, known=known)


@dataclass(frozen=True)
class Prediction:
    """The rate at which the SLO is just kept, and what requests get there."""

    rate_per_s: float
    outcome: Outcome


def outcome(on: Server, requests: Requests, rate_per_s: float, *, answer_s: float = 0.0) -> Outcome:
    """Play the requests at a rate, for long enough that a queue would show."""
    count = min(len(requests.due), max(_LEAST, int(rate_per_s * answer_s * _ANSWERS)))
    due = array("d", (moment / rate_per_s for moment in requests.due[:count]))
    return simulate(
        due,
        requests.prompts,
        requests.outputs,
        on.times,
        on.limits,
        known_share=requests.lengths.known_share,
        warm=count // _WARM,
    )


def keeps(slo: SLO, found: Outcome) -> bool:
    """Tell whether a simulated outcome keeps the SLO, and does so however long one looks."""
    if found.refused or not found.e2e:
        return False
    values = {
        "ttft": sorted(found.ttft),
        "tpot": sorted(found.tpot),
        "itl": sorted(found.tpot),
        "e2e": sorted(found.e2e),
    }
    for metric, share, limit in slo.bounds():
        if values[metric] and statistics.quantile(values[metric], share) > limit:
            return False
    patience = max((limit for metric, _, limit in slo.bounds() if metric == "ttft"), default=math.inf)
    return found.waiting_s <= _GROWING * patience


def knee(on: Server, requests: Requests, slo: SLO, *, flow: Fluid) -> Prediction | None:
    """Return the highest rate that keeps the SLO, looking around what a steady flow could; None where none does."""
    holds, breaks, rate = 0.0, flow.rate_per_s * _BEYOND, flow.rate_per_s * 0.75
    best: Outcome | None = None
    for _ in range(_ROUNDS):
        found = outcome(on, requests, rate, answer_s=flow.answer_s)
        if keeps(slo, found):
            holds, best = rate, found
        else:
            breaks = rate
        if not holds:
            rate = breaks / 3
        elif breaks / holds < _CLOSE:
            break
        else:
            rate = math.sqrt(holds * breaks)
    return Prediction(holds, best) if best is not None else None


def percentiles(values: Sequence[float], spread: Spread, names: Sequence[str]) -> dict[str, Interval]:
    """Return percentiles with the interval that past errors give."""
    ordered = sorted(values)
    found = {}
    for name in names:
        value = statistics.quantile(ordered, float(name[1:]) / 100)
        found[name] = Interval(value, value * spread.low, value * spread.high)
    return found
