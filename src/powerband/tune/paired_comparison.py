"""Contenders measured in turns, round after round, so that what the machine does meanwhile befalls all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from powerband.core.statistics import UNBOUND, Interval, student, z_of

Knees = Mapping[str, Sequence[float]]  # of each contender, one a round


_FINEST = 0.02  # no climb tells knees apart that are nearer, as a logarithm, however alike a few rounds were


def turns(contenders: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield who is measured next: A B C, C B A, A B C ..."""
    for number in range(rounds):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            yield number, name


def mean(knees: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(math.log(knee) for knee in knees) / len(knees))


def ratio(knees: Knees, one: str, other: str, *, level: float = 0.95) -> Interval:
    """Return how many times the knee of one is that of another.

    Round by round, so that what befell both of them is not counted; what is left is their own noise, which another
    contender need not have. Who has left the contest has its first rounds alone.
    """
    gaps = [math.log(mine / theirs) for mine, theirs in zip(knees[one], knees[other], strict=False)]
    value, freedom = math.exp(math.fsum(gaps) / len(gaps)), len(gaps) - 1
    if freedom < 1:
        return Interval(value, 0.0, UNBOUND)
    reach = max(student(freedom, z_of(level)) * statistics.stdev(gaps) / math.sqrt(len(gaps)), _FINEST)
    return Interval(value, value * math.exp(-reach), value * math.exp(reach))
