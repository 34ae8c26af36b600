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
from powerband.plan.options import Lengths, Option
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.times import StepTimes
from powerband.plan.work import Batch

_ROUNDS = 7
_CLOSE = 1.04
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
    bound_by: str


def times(option: Option, coefficients: Coefficients) -> StepTimes:
    """Return the step times of an option."""
    return StepTimes(option.steps, option.offer.device, coefficients)


def fluid(option: Option, coefficients: Coefficients, lengths: Lengths, slo: SLO) -> Fluid:
    """Return the highest steady rate whose mean time per token keeps the SLO."""
    step = times(option, coefficients)
    fresh = lengths.prompt * (1 - lengths.known_share)
    whole = Batch(prefill=fresh, behind=lengths.prompt - fresh / 2, firsts=1)
    prefill_s = max(step(whole) - coefficients.step_s, 1e-9)
    limit = min((seconds for metric, _, seconds in slo.bounds() if metric in ("tpot", "itl")), default=math.inf)
    low, high = 1.0, float(option.choice.sequences)

    def token_s(batch: float) -> float:
        return step(Batch(decodes=batch, context=lengths.held)) + batch / lengths.output * prefill_s

    if token_s(high) > limit:
        for _ in range(12):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if token_s(middle) <= limit else (low, middle)
        high = low
    each = token_s(high)
    bound = "the SLO" if high < option.choice.sequences else "memory for the KV cache"
    if high == float(option.choice.sequences) and option.memory.sequences > option.choice.sequences:
        bound = "the batch's size"
    share = high / lengths.output * prefill_s / each
    return Fluid(high / (lengths.output * each), lengths.output * each, share, bound)


@dataclass(frozen=True)
class Prediction:
    """The rate at which the SLO is just kept, and what requests get there."""

    rate_per_s: float
    outcome: Outcome


def outcome(
    option: Option, coefficients: Coefficients, requests: Requests, rate_per_s: float, *, answer_s: float = 0.0
) -> Outcome:
    """Play the requests at a rate, for long enough that a queue would show."""
    count = min(len(requests.due), max(_LEAST, int(rate_per_s * answer_s * _ANSWERS)))
    limits = Limits(
        sequences=option.choice.sequences,
        batched_tokens=option.choice.batched_tokens,
        kv_tokens=option.memory.kv_cache / option.memory.kv_per_token,
        request_s=coefficients.request_s,
    )
    due = array("d", (moment / rate_per_s for moment in requests.due[:count]))
    return simulate(
        due,
        requests.prompts,
        requests.outputs,
        times(option, coefficients),
        limits,
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


def knee(option: Option, coefficients: Coefficients, requests: Requests, slo: SLO, *, flow: Fluid) -> Prediction | None:
    """Return the highest rate that keeps the SLO, below what a steady flow could; None where none does."""
    holds, breaks, rate = 0.0, flow.rate_per_s, flow.rate_per_s * 0.75
    best: Outcome | None = None
    for _ in range(_ROUNDS):
        found = outcome(option, coefficients, requests, rate, answer_s=flow.answer_s)
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
