"""Has the traffic left the region that a recipe was proven in? One number per axis and request, summed until sure.

Each value is turned into a normal score by its rank among what the recipe was proven with, so every axis looks alike
whatever its distribution. Two sums per axis (CUSUM) grow while scores lean to one side, and alarm beyond doubt.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_LEAN = 0.25  # standard deviations that are no drift yet
_ALARM, _WINDOW_ALARM = 26.0, 18.0  # sums that chance reaches once in millions of requests
_FAR = 3.0  # one value may not say more than this
_SETTLED = 200  # requests, after which sessions that are shorter than the proven ones count too
GAPS = 25  # between arrivals, of which one burstiness is made


@dataclass(frozen=True)
class Row:
    """What is remembered of a request: when, how long, and how much of it was known. Not what it said."""

    at_s: float
    prompt: float
    output: float
    prefix_share: float
    turns: float


@dataclass
class Sums:
    """The two sums of one axis."""

    alarm: float
    up: float = 0.0
    down: float = 0.0
    up_since: float | None = None
    down_since: float | None = None

    def add(self, score: float, at_s: float) -> str:
        """Return 'higher' or 'lower' where it is beyond doubt, else nothing."""
        score = max(-_FAR, min(_FAR, score))
        if (up := self.up + score - _LEAN) <= 0 or self.up_since is None:
            self.up_since = at_s
        if (down := self.down - score - _LEAN) <= 0 or self.down_since is None:
            self.down_since = at_s
        self.up, self.down = max(0.0, up), max(0.0, down)
        return "higher" if self.up > self.alarm else "lower" if self.down > self.alarm else ""

    def since(self, side: str) -> float:
        """Return when a sum began to grow."""
        return (self.up_since if side == "higher" else self.down_since) or 0.0


@dataclass(frozen=True)
class Alarm:
    """An axis that drifted."""

    axis: str
    side: str
    since_s: float
    request: int  # by its number


@dataclass
class Scores:
    """A distribution, as ranks."""

    values: list[float]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.values = sorted(self.values)
        self._normal = statistics.NormalDist()

    def score(self, value: float) -> float:
        """Return where a value stands, as a normal score; ties are broken by lot, so that they too are normal."""
        low, high = bisect_left(self.values, value), bisect_right(self.values, value)
        place = low + self.rng.random() * (high - low) if high > low else float(low)
        return self._normal.inv_cdf((place + 0.5) / (len(self.values) + 1))


class Drift:
    """Every axis of the traffic beside what the recipe was proven with."""

    def __init__(self, proven: Sequence[Row]) -> None:
        self._scores = {
            axis: Scores([getattr(one, axis) for one in proven])
            for axis in ("prompt", "output", "prefix_share", "turns")
        }
        self._sums = {axis: Sums(_ALARM) for axis in self._scores}
        self._opening = min(one.turns for one in proven)  # later turns come when an answer was read: no arrivals
        self._latest, self._settled = max(one.turns for one in proven), False
        came = [one.at_s for one in proven if one.turns == self._opening]
        gaps = [later - early for early, later in pairwise(came)]
        self._bursts = Scores([burstiness(gaps[at : at + GAPS]) for at in range(0, len(gaps) - GAPS + 1, 5)])
        self._burst_sums = Sums(_WINDOW_ALARM)
        self._gaps: list[float] = []
        self._last_s: float | None = None
        self.seen = 0

    def see(self, row: Row) -> list[Alarm]:
        """Return the axes that are beyond doubt with this request."""
        self.seen += 1
        self._settled = self._settled or row.turns >= self._latest or self.seen > _SETTLED
        if not self._settled:  # a new fleet sees first turns only, until the first sessions come to their last
            return []
        found = []
        for axis, sums in self._sums.items():
            if side := sums.add(self._scores[axis].score(getattr(row, axis)), row.at_s):
                found.append(Alarm(axis, side, sums.since(side), self.seen))
                self._sums[axis] = Sums(_ALARM)
        return found + self._arrived(row) if row.turns <= self._opening else found

    def _arrived(self, row: Row) -> list[Alarm]:
        """Judge the burstiness of every so many arrivals."""
        if self._last_s is not None:
            self._gaps.append(row.at_s - self._last_s)
        self._last_s = row.at_s
        if len(self._gaps) < GAPS or not self._bursts.values:
            return []
        sums, score = self._burst_sums, self._bursts.score(burstiness(self._gaps))
        self._gaps.clear()
        if not (side := sums.add(score, row.at_s)):
            return []
        self._burst_sums = Sums(_WINDOW_ALARM)
        return [Alarm("burstiness", side, sums.since(side), self.seen)]


def burstiness(gaps: Iterable[float]) -> float:
    """Return the coefficient of variation of gaps, whatever the rate."""
    held = list(gaps)
    mean = statistics.fmean(held)
    return statistics.pstdev(held) / mean if mean > 0 else math.inf
