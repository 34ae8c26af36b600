"""Arrival times of requests, in seconds from the start of the run, determined by the seed."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence

from powerband.core.workload import Bursts, Closed, Constant, Gamma, Poisson, Recorded, Workload


def times_s(workload: Workload, count: int, *, recorded_s: Sequence[float] = ()) -> array[float]:
    """Return the due times of `count` arrivals; in a closed loop all are zero."""
    arrivals = workload.arrivals
    rng = random.Random(f"arrivals {workload.seed}")
    if isinstance(arrivals, Closed):
        return array("d", bytes(8 * count))
    if isinstance(arrivals, Recorded):
        return _recorded(recorded_s, count, arrivals.rate_per_s)
    rate = arrivals.rate_per_s / (workload.turns.count if workload.turns else 1)
    if isinstance(arrivals, Bursts):
        interval_s = arrivals.size / rate
        return array("d", (number // arrivals.size * interval_s for number in range(count)))
    return array("d", itertools.islice(itertools.accumulate(_gaps(arrivals, rate, rng)), count))


def _gaps(arrivals: Poisson | Gamma | Constant, rate: float, rng: random.Random) -> Iterator[float]:
    if isinstance(arrivals, Poisson):
        while True:
            yield rng.expovariate(rate)
    if isinstance(arrivals, Gamma):
        shape = 1 / arrivals.variation**2
        while True:
            yield rng.gammavariate(shape, 1 / (rate * shape))
    yield from itertools.repeat(1 / rate)


def _recorded(recorded_s: Sequence[float], count: int, rate: float | None) -> array[float]:
    """Return the recorded times, scaled to a rate; after its end the trace repeats."""
    first, span = recorded_s[0], recorded_s[-1] - recorded_s[0]
    length = len(recorded_s)
    period = span * length / max(1, length - 1) or 1.0
    scale = (length / period) / rate if rate else 1.0
    times = ((recorded_s[number % length] - first) + number // length * period for number in range(count))
    return array("d", (at_s * scale for at_s in times))
