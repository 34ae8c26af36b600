"""Drift detection: has the traffic left the region that a recipe was measured in?

Each feature of a request becomes a normal score by its rank in the reference traffic, which makes all axes comparable
whatever their distributions. Two one-sided CUSUM statistics per axis accumulate the scores, and raise an alarm when one
of them exceeds a threshold that unchanged traffic practically never reaches.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SLACK = 0.25  # in standard deviations: smaller shifts are not drift
_THRESHOLD, _BURSTINESS_THRESHOLD = 26.0, 18.0  # exceeded by chance once in millions of requests
_MAX_SCORE = 3.0  # limits the weight of one value
_WARMUP_REQUESTS = 200  # after which even sessions that are shorter than the reference ones count
WINDOW_GAPS = 25  # gaps between arrivals in one burstiness value


@dataclass(frozen=True)
class RequestFeatures:
    """The features of one request that are compared: no prompt text."""

    at_s: float
    prompt: float
    output: float
    prefix_share: float
    turns: float


@dataclass
class Cusum:
    """The two CUSUM statistics of one axis."""

    threshold: float
    up: float = 0.0
    down: float = 0.0
    up_since: float | None = None
    down_since: float | None = None

    def add(self, score: float, at_s: float) -> str:
        """Return 'higher' or 'lower' if a statistic exceeds the threshold, else ''."""
        score = max(-_MAX_SCORE, min(_MAX_SCORE, score))
        if (up := self.up + score - _SLACK) <= 0 or self.up_since is None:
            self.up_since = at_s
        if (down := self.down - score - _SLACK) <= 0 or self.down_since is None:
            self.down_since = at_s
        self.up, self.down = max(0.0, up), max(0.0, down)
        return "higher" if self.up > self.threshold else "lower" if self.down > self.threshold else ""

    def since(self, side: str) -> float:
        """Return when a statistic began to grow."""
        return (self.up_since if side == "higher" else self.down_since) or 0.0


@dataclass(frozen=True)
class Alarm:
    """Drift of one axis."""

    axis: str
    side: str
    since_s: float
    request: int  # number of the request at which it was detected


@dataclass
class RankScores:
    """Normal scores of values by their rank in a reference sample."""

    values: list[float]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.values = sorted(self.values)
        self._normal = statistics.NormalDist()

    def score(self, value: float) -> float:
        """Return a value's normal score; ties are broken at random, so that discrete values have normal scores too."""
        low, high = bisect_left(self.values, value), bisect_right(self.values, value)
        rank = low + self.rng.random() * (high - low) if high > low else float(low)
        return self._normal.inv_cdf((rank + 0.5) / (len(self.values) + 1))


class DriftDetector:
    """Compares requests with the reference traffic of a recipe, axis by axis."""

    def __init__(self, reference: Sequence[RequestFeatures]) -> None:
        self._scores = {
            axis: RankScores([getattr(one, axis) for one in reference])
            for axis in ("prompt", "output", "prefix_share", "turns")
        }
        self._cusums = {axis: Cusum(_THRESHOLD) for axis in self._scores}
        # only the first turns of sessions are arrivals: a later turn follows the answer to the one before it
        self._first_turn = min(one.turns for one in reference)
        self._last_turn, self._warmed_up = max(one.turns for one in reference), False
        arrivals = [one.at_s for one in reference if one.turns == self._first_turn]
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        starts = range(0, len(gaps) - WINDOW_GAPS + 1, 5)
        self._burstiness_scores = RankScores([burstiness(gaps[at : at + WINDOW_GAPS]) for at in starts])
        self._burstiness_cusum = Cusum(_BURSTINESS_THRESHOLD)
        self._gaps: list[float] = []
        self._last_arrival_s: float | None = None
        self.seen = 0

    def update(self, row: RequestFeatures) -> list[Alarm]:
        """Add a request, and return the alarms that it raises."""
        self.seen += 1
        self._warmed_up = self._warmed_up or row.turns >= self._last_turn or self.seen > _WARMUP_REQUESTS
        if not self._warmed_up:  # until the first sessions end, a new fleet sees too many early turns
            return []
        alarms = []
        for axis, cusum in self._cusums.items():
            if side := cusum.add(self._scores[axis].score(getattr(row, axis)), row.at_s):
                alarms.append(Alarm(axis, side, cusum.since(side), self.seen))
                self._cusums[axis] = Cusum(_THRESHOLD)
        return alarms + self._update_burstiness(row) if row.turns <= self._first_turn else alarms

    def _update_burstiness(self, row: RequestFeatures) -> list[Alarm]:
        """Add an arrival, and check the burstiness once per window of arrivals."""
        if self._last_arrival_s is not None:
            self._gaps.append(row.at_s - self._last_arrival_s)
        self._last_arrival_s = row.at_s
        if len(self._gaps) < WINDOW_GAPS or not self._burstiness_scores.values:
            return []
        cusum, score = self._burstiness_cusum, self._burstiness_scores.score(burstiness(self._gaps))
        self._gaps.clear()
        if not (side := cusum.add(score, row.at_s)):
            return []
        self._burstiness_cusum = Cusum(_BURSTINESS_THRESHOLD)
        return [Alarm("burstiness", side, cusum.since(side), self.seen)]


def burstiness(gaps: Iterable[float]) -> float:
    """Return the coefficient of variation of gaps: it does not depend on the rate."""
    values = list(gaps)
    mean = statistics.fmean(values)
    return statistics.pstdev(values) / mean if mean > 0 else math.inf
