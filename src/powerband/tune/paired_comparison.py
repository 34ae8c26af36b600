"""Compare contenders measured in interleaved rounds, so that drift of the machine affects all of them alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from powerband.core.statistics import UNBOUNDED, Interval, student_t, z_of

MaxRates = Mapping[str, Sequence[float]]  # contender to its max rate in each round

_MIN_HALF_WIDTH = 0.02  # of a log ratio: a climb resolves no smaller difference, even if a few rounds agree


def interleave(contenders: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the round and contender to measure next: A B C, C B A, A B C ..."""
    for number in range(rounds):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            yield number, name


def geometric_mean(rates: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(math.log(rate) for rate in rates) / len(rates))


def ratio(rates: MaxRates, one: str, other: str, *, level: float = 0.95) -> Interval:
    """Return the max rate of one contender over that of another, with a confidence interval.

    Rates are paired by round, which cancels what both have in common. The variance is that of this pair alone, since
    another contender can have different noise. Rounds that only one of the two has are ignored.
    """
    gaps = [math.log(mine / theirs) for mine, theirs in zip(rates[one], rates[other], strict=False)]
    value, freedom = math.exp(math.fsum(gaps) / len(gaps)), len(gaps) - 1
    if freedom < 1:
        return Interval(value, 0.0, UNBOUNDED)
    half_width = max(student_t(freedom, z_of(level)) * statistics.stdev(gaps) / math.sqrt(len(gaps)), _MIN_HALF_WIDTH)
    return Interval(value, value * math.exp(-half_width), value * math.exp(half_width))
