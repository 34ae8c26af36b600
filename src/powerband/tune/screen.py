"""Estimate the max rate of a deployment from closed-loop levels of a few requests each.

The levels give the throughput and the latencies at two numbers of concurrent users. Between and beyond them both are
interpolated, and requests that arrive at random make the number of users fluctuate: a birth-death chain with the
measured throughputs gives its distribution at any rate. The estimate is the highest rate at which the SLO's share of
requests finds few enough users.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from powerband.core.measurement import GRID, Level
from powerband.core.slo import SLO
from powerband.core.statistics import Interval

SPREAD = 1.6  # 80 % of the max rates are within this factor of the estimate
_MAX_USERS = 4096
_MIN_SECOND_USERS, _MAX_SECOND_USERS = 8, 64
_FIRST_ANSWERS_S = 15.0  # that the first answers of a level's users may take at the last level's throughput
_MAX_SCREEN_USERS, _MORE_USERS = 2048, 6
_MIN_EXPONENT = 0.4  # of the growth of throughput with users: less is not worth another level
# Quantile of the latencies that a number of users causes. Arrivals cause the rest of the spread, but for E2E also the
# lengths of the answers.
_TYPICAL = {"e2e": 0.75}
_TYPICAL_OTHERS = 0.5


@dataclass(frozen=True)
class Point:
    """Throughput and typical latencies at a number of concurrent users."""

    users: int
    rate_per_s: float
    latencies_s: Mapping[str, float]  # by metric


def point(level: Level) -> Point:
    """Return the point that a closed-loop level measured."""
    latencies = {
        name: one.grid[bisect_left(GRID, _TYPICAL.get(name, _TYPICAL_OTHERS))] for name, one in level.latencies.items()
    }
    return Point(level.users or 1, level.achieved_per_s, latencies)


def next_users(points: Sequence[Point], slo: SLO) -> int:
    """Return the next number of users to measure; 0 if more users would break the SLO, or would gain nothing.

    After one user these are about as many as the SLO allows if each slows the others down. Each later level that is
    within the SLO and gained throughput, as on a GPU, is followed by one with several times its users.
    """
    last, rooms = points[-1], 4.0
    late = [limit / last.latencies_s[metric] for metric, _, limit in slo.bounds() if last.latencies_s.get(metric)]
    rooms = min(late, default=rooms)
    if rooms < 1:
        return 0
    answered = round(_FIRST_ANSWERS_S * last.rate_per_s)
    if len(points) == 1:
        most = min(_MAX_SECOND_USERS, max(_MIN_SECOND_USERS, answered))
        return max(2, min(most, round(rooms)))
    before = points[-2]
    exponent = math.log(last.rate_per_s / before.rate_per_s) / math.log(last.users / before.users)
    more = min(_MAX_SCREEN_USERS, _MORE_USERS * last.users, answered)
    return more if exponent > _MIN_EXPONENT and more > last.users else 0


def excess(point: Point, slo: SLO) -> float:
    """Return the largest ratio of a latency to its bound."""
    ratios = [point.latencies_s[metric] / limit for metric, _, limit in slo.bounds() if metric in point.latencies_s]
    return max(ratios, default=0.0)


def shown(point: Point, slo: SLO) -> dict[str, float]:
    """Return the typical latencies that the SLO bounds."""
    bounded = [metric for metric, _, _ in slo.bounds() if metric in point.latencies_s]
    return {f"{metric} {_name(metric)}": point.latencies_s[metric] for metric in bounded}


def late(point: Point, slo: SLO) -> str:
    """Return the latencies beyond their bounds, as text."""
    beyond = [
        f"{metric.upper()} {_name(metric)} {point.latencies_s[metric] * 1e3:.0f} ms (limit {limit * 1e3:.0f} ms)"
        for metric, _, limit in slo.bounds()
        if point.latencies_s.get(metric, 0.0) > limit
    ]
    return ", ".join(beyond)


def _name(metric: str) -> str:
    return f"p{100 * _TYPICAL.get(metric, _TYPICAL_OTHERS):g}"


def estimate(points: Sequence[Point], slo: SLO) -> Interval | None:
    """Return the estimated max rate with an 80 % interval; None if the SLO is missed with one user."""
    ordered = sorted(points, key=lambda one: one.users)
    if not ordered or excess(ordered[0], slo) > 1 or min(one.rate_per_s for one in ordered) <= 0:
        return None
    rates = [rate for metric, share, limit in slo.bounds() if (rate := _rate(ordered, metric, share, limit))]
    if not rates:
        return None
    return Interval(min(rates), min(rates) / SPREAD, min(rates) * SPREAD)


def _rate(points: Sequence[Point], metric: str, share: float, limit: float) -> float | None:
    """Return the rate at which a share of the arrivals finds so few users that a latency is within its bound."""
    if metric not in points[0].latencies_s:
        return None
    allowed = 1
    while allowed < _MAX_USERS and _at(points, allowed + 1, lambda one: one.latencies_s[metric]) <= limit:
        allowed += max(1, allowed // 16)
    throughputs = [_throughput(points, users) for users in range(1, allowed + 1)]
    low, high = 0.0, throughputs[-1]
    for _ in range(30):
        rate = (low + high) / 2
        low, high = (rate, high) if _share_within(throughputs, rate) >= share else (low, rate)
    return low


def _share_within(throughputs: Sequence[float], rate: float) -> float:
    """Return the share of the time with fewer users than there are throughputs, if requests arrive at a rate."""
    weight = total = 1.0
    for throughput in throughputs[:-1]:
        weight *= rate / throughput
        total += weight
    tail = weight * (rate / throughputs[-1])
    ratio = rate / throughputs[-1]
    return total / (total + (tail / (1 - ratio) if ratio < 1 else math.inf))


def _throughput(points: Sequence[Point], users: int) -> float:
    """Return the throughput at a number of users; beyond the measured ones it does not grow."""
    return _at(points, min(users, points[-1].users), lambda one: one.rate_per_s)


def _at(points: Sequence[Point], users: int, value: Callable[[Point], float]) -> float:
    """Return a value at a number of users: a power law between two points, proportional to users beyond the last."""
    for one, other in pairwise(points):
        if users <= other.users:
            part = math.log(users / one.users) / math.log(other.users / one.users)
            return value(one) * math.pow(value(other) / value(one), part)
    return value(points[-1]) * users / points[-1].users
