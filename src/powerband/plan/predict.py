"""Predict the highest rate within the SLO: a fluid estimate for every option, a simulation for the best of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from powerband.core import statistics
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.plan.closed_loop import SteadyState, steady_state
from powerband.plan.options import Lengths, Option
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_time import StepTimes

_ROUNDS = 7
_START = 0.75  # share of the fluid estimate where a search begins
_PRECISION = 1.04  # the search stops when a failing rate is within this factor of a passing one
_CAPACITY_ROUNDS = 4  # requests of each user of the closed loop that shows the capacity
_MIN_REQUESTS = 240  # of a simulation
_MIN_DURATION_IN_ANSWERS = 6  # of a simulation, so that a growing queue shows
_WARMUP_DIVISOR = 3  # the first third of a simulation is not counted
_TAIL_FROM = 0.75  # quantile from which `tpot_tail` holds
_GROWING_QUEUE = 3.0  # the queue grows if the last TTFT exceeds its limit by this factor


@dataclass(frozen=True)
class Requests:
    """The workload's requests at one per second; any other rate scales the due times."""

    due: Sequence[float]
    prompts: Sequence[int]
    outputs: Sequence[int]
    lengths: Lengths

    def first(self, count: int) -> tuple[list[float], list[int], list[int]]:
        """Return due times, prompts and outputs of the first requests; beyond the last one they repeat."""
        own = len(self.due)
        period = self.due[-1] * own / max(1, own - 1)
        due = [self.due[number % own] + number // own * period for number in range(count)]
        prompts, outputs = (list(islice(cycle(some), count)) for some in (self.prompts, self.outputs))
        return due, prompts, outputs


@dataclass(frozen=True)
class FluidEstimate:
    """The result of a closed loop of average requests: fast to compute, without percentiles."""

    rate_per_s: float
    answer_s: float
    prefill_share: float  # of the engine's time
    limited_by: str


@dataclass(frozen=True)
class Server:
    """A simulated replica: its step times and its scheduler's limits."""

    times: StepTimes
    limits: Limits


def server_for(option: Option, coefficients: Coefficients) -> Server:
    """Return the simulated replica of an option."""
    groups, speculation = option.split.data, option.speculation
    limits = Limits(
        sequences=option.settings.sequences * groups,
        batched_tokens=option.settings.batched_tokens * groups,
        kv_tokens=option.memory.kv_cache / option.memory.kv_per_token * groups,
        request_s=coefficients.request_s,
        tokens_per_step=speculation.tokens_per_step,
    )
    return Server(StepTimes(option.steps, option.offer.device, coefficients, speculation=speculation), limits)


def fluid_estimate(server: Server, lengths: Lengths, slo: SLO) -> FluidEstimate:
    """Return the highest rate of a closed loop whose mean TPOT meets the SLO."""
    limit = min((seconds for metric, _, seconds in slo.bounds() if metric in ("tpot", "itl")), default=math.inf)
    fits_in_kv = server.limits.kv_tokens / lengths.mean_kv_tokens
    most = max(1.0, min(float(server.limits.sequences), fits_in_kv))
    low, high = 1.0, most
    if closed_loop(server.times, high, lengths).tpot_s > limit:
        for _ in range(12):
            middle = math.sqrt(low * high)
            meets_limit = closed_loop(server.times, middle, lengths).tpot_s <= limit
            low, high = (middle, high) if meets_limit else (low, middle)
        high = low
    found = closed_loop(server.times, high, lengths)
    if high < most:
        limited_by = "the SLO"
    else:
        limited_by = "KV-cache memory" if fits_in_kv < server.limits.sequences else "the batch size"
    return FluidEstimate(
        rate_per_s=high / (lengths.output * found.tpot_s),
        answer_s=lengths.output * found.tpot_s,
        prefill_share=1 - found.decode_s / server.limits.tokens_per_step / found.tpot_s,
        limited_by=limited_by,
    )


def closed_loop(times: StepTimes, concurrency: float, lengths: Lengths) -> SteadyState:
    """Return the steady state of a closed loop of average requests."""
    cached = lengths.prompt * lengths.cached_share
    return steady_state(times, concurrency=concurrency, prompt=lengths.prompt, output=lengths.output, cached=cached)


def capacity(server: Server, requests: Requests) -> float:
    """Return the throughput of a simulated closed loop that fills the batch or the KV cache; 0 if no request fits.

    A higher rate makes the queue grow, which a simulation of a fast device is too short to show.
    """
    fitting = server.limits.kv_tokens / requests.lengths.mean_kv_tokens
    users = max(1, int(min(server.limits.sequences, fitting)))
    _, prompts, outputs = requests.first(_CAPACITY_ROUNDS * users)
    found = simulate(
        [0.0] * users,
        prompts,
        outputs,
        server.times,
        server.limits,
        cached_share=requests.lengths.cached_share,
        closed=True,
    )
    if not (ends := sorted(due + e2e for due, e2e in zip(found.due, found.e2e, strict=True))):
        return 0.0
    first, last = len(ends) // 4, 3 * len(ends) // 4  # without the start, and the end, when users are missing
    return (last - first) / (ends[last] - ends[first]) if ends[last] > ends[first] else math.inf


@dataclass(frozen=True)
class Prediction:
    """The highest rate that meets the SLO, and the simulated latencies at that rate."""

    rate_per_s: float
    outcome: Outcome


def outcome_at(
    server: Server, requests: Requests, rate_per_s: float, *, answer_s: float = 0.0, slo: SLO | None = None
) -> Outcome:
    """Simulate the requests at a rate, for long enough that a growing queue shows.

    With an SLO, the outcome is empty if so many requests are late that the rest cannot make up for them.
    """
    count = max(_MIN_REQUESTS, int(rate_per_s * answer_s * _MIN_DURATION_IN_ANSWERS))
    warmup = count // _WARMUP_DIVISOR
    due, prompts, outputs = requests.first(count)
    return simulate(
        array("d", (moment / rate_per_s for moment in due)),
        prompts,
        outputs,
        server.times,
        server.limits,
        cached_share=requests.lengths.cached_share,
        warmup=warmup,
        stop_when=_too_many_late(slo, count - warmup, server.times.coefficients) if slo else None,
    )


def _too_many_late(slo: SLO, count: int, coefficients: Coefficients) -> Callable[[float, float, int], bool]:
    """Return a function that counts the late ones of `count` requests, and is true once a percentile must be late."""
    bounds = [
        (metric, limit / tail(metric, share, coefficients), count - int(share * (count - 1)))
        for metric, share, limit in slo.bounds()
    ]
    late = [0] * len(bounds)

    def is_too_late(ttft: float, e2e: float, output: int) -> bool:
        for place, (metric, limit, most) in enumerate(bounds):
            if metric in ("ttft", "e2e"):
                late[place] += (ttft if metric == "ttft" else e2e) > limit
            elif output > 1:
                late[place] += (e2e - ttft) / (output - 1) > limit
            if late[place] >= most:
                return True
        return False

    return is_too_late


def tail(metric: str, share: float, coefficients: Coefficients) -> float:
    """Return the factor on a simulated quantile: under mixed load the slow requests are slower than simulated."""
    return coefficients.tpot_tail if metric in ("tpot", "itl") and share >= _TAIL_FROM else 1.0


def meets(slo: SLO, found: Outcome, coefficients: Coefficients) -> bool:
    """Return whether a simulated outcome meets the SLO and its queue does not grow."""
    if found.rejected or not found.e2e:
        return False
    values = {
        "ttft": sorted(found.ttft),
        "tpot": sorted(found.tpot),
        "itl": sorted(found.tpot),
        "e2e": sorted(found.e2e),
    }
    for metric, share, limit in slo.bounds():
        if values[metric] and statistics.quantile(values[metric], share) * tail(metric, share, coefficients) > limit:
            return False
    max_ttft = max((limit for metric, _, limit in slo.bounds() if metric == "ttft"), default=math.inf)
    return found.last_ttft_s <= _GROWING_QUEUE * max_ttft


def max_rate(
    server: Server, requests: Requests, slo: SLO, *, estimate: FluidEstimate, start_share: float = 0.0
) -> Prediction | None:
    """Return the highest rate that meets the SLO, below the capacity; None if no rate does.

    The search begins near the fluid estimate, at `start_share` of it if that was right for a similar deployment.
    """
    passing, failing, step = 0.0, capacity(server, requests), _PRECISION
    if not failing:
        return None
    near = start_share > _START  # else the known rate was limited by something else than the fluid estimate
    rate = min(estimate.rate_per_s * (start_share if near else _START), failing / _PRECISION)
    best: Outcome | None = None
    for _ in range(_ROUNDS):
        found = outcome_at(server, requests, rate, answer_s=estimate.answer_s, slo=slo)
        if meets(slo, found, server.times.coefficients):
            passing, best = rate, found
        else:
            failing = rate
        if passing and failing / passing <= _PRECISION * 1.001:
            break
        if not near:
            rate = math.sqrt(passing * failing) if passing else failing / 3
        elif passing:  # the lowest failing rate is probably near
            rate = min(passing * step, math.sqrt(passing * failing))
            step **= 2
        else:
            rate = failing / step
            step **= 2
    return Prediction(passing, best) if best is not None else None


def max_rate_interval(server: Server, requests: Requests, slo: SLO, rate_per_s: float) -> Interval:
    """Return the max rate with those for step times at both ends of their spread.

    Where latency grows slowly with the rate, a small error of the step times moves the max rate far.
    """
    spread, rates = server.times.coefficients.tpot, [rate_per_s]
    for factor in (spread.high, spread.low):
        scaled = Server(server.times.scaled(prefill=factor, decode=factor), server.limits)
        estimate = fluid_estimate(scaled, requests.lengths, slo)
        found = max_rate(scaled, requests, slo, estimate=estimate)
        rates.append(found.rate_per_s if found else 0.0)
    return Interval(rate_per_s, min(rates), max(rates))


def percentiles(values: Sequence[float], spread: Spread, names: Sequence[str]) -> dict[str, Interval]:
    """Return percentiles with the interval of past prediction errors."""
    ordered = sorted(values)
    found = {}
    for name in names:
        value = statistics.quantile(ordered, float(name[1:]) / 100)
        found[name] = Interval(value, value * spread.low, value * spread.high)
    return found
