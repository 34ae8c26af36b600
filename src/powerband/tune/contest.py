"""Contenders measured in turns, round after round, so that what the machine does meanwhile befalls all of them."""

from __future__ import annotations

import math
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

    Rounds and contenders each shift the logarithm of a knee; what they leave unexplained is noise, the same for all, so
    every contender helps to tell how large it is.
    """
    logs = {name: [math.log(knee) for knee in found] for name, found in knees.items()}
    rounds = len(logs[one])
    own = {name: math.fsum(found) / rounds for name, found in logs.items()}
    value = math.exp(own[one] - own[other])
    freedom = (rounds - 1) * (len(logs) - 1)
    if freedom < 1:
        return Interval(value, 0.0, UNBOUND)
    by_round = [math.fsum(found[number] for found in logs.values()) / len(logs) for number in range(rounds)]
    whole = math.fsum(by_round) / rounds
    noise = math.fsum(
        (found[number] - own[name] - by_round[number] + whole) ** 2
        for name, found in logs.items()
        for number in range(rounds)
    )
    reach = max(student(freedom, z_of(level)) * math.sqrt(2 * noise / freedom / rounds), _FINEST)
    return Interval(value, value * math.exp(-reach), value * math.exp(reach))
