"""How many replicas, now: a pure function of what was seen, told the time.

Traffic is counted in places: the rate, times how long one answer takes. What will be asked for when a new replica is
ready decides, with room for chance and for those who wait already. Fewer replicas are kept only when nothing called for
more for a while, and the while is as long as a mistake is dear: it grows with the time that a start takes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingPolicy:
    """What is known of the recipe, and what the user wants."""

    rate_per_s: float  # that one replica carries with the SLO kept
    places: int  # requests at once, of one replica
    start_s: float  # measured
    least: int = 1
    most: int = 100

    @property
    def hold_s(self) -> float:
        """Return for how long fewer must have done before one is stopped."""
        return max(10.0, 10.0 * self.start_s)

    @property
    def sure(self) -> float:
        """Return how many standard deviations of the places in use to be ready for: a quick start makes up for them."""
        return min(1.0, self.start_s / 60)

    @property
    def window_s(self) -> float:
        """Return over how long arrivals are counted: long enough to know them, short enough to see them change."""
        return max(15.0, min(60.0, self.start_s))


@dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at one moment."""

    at_s: float
    ready: int
    starting: int
    waiting: int
    running: int
    arrived: int  # in all


class Autoscaler:
    """The policy with its memory of arrivals."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self._history: deque[tuple[float, int]] = deque()
        self._needs: deque[tuple[float, int]] = deque()  # the highest first: what was needed lately

    def wanted(self, seen: FleetSnapshot) -> int:
        """Return how many replicas there should be."""
        policy = self.policy
        if not self._history:  # what is there was wanted by somebody, who may have known more
            self._needs.append((seen.at_s, seen.ready + seen.starting))
        self._history.append((seen.at_s, seen.arrived))
        while len(self._history) > 2 and self._history[1][0] <= seen.at_s - policy.window_s:
            self._history.popleft()
        need = self._need(seen)
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((seen.at_s, need))
        while self._needs[0][0] < seen.at_s - policy.hold_s:
            self._needs.popleft()
        return max(policy.least, min(policy.most, self._needs[0][1]))

    def _need(self, seen: FleetSnapshot) -> int:
        """Return how many replicas have places enough for what comes, and for what waits."""
        policy = self.policy
        service_s = policy.places / policy.rate_per_s
        used = max(self._rate_per_s() * service_s, float(seen.running))
        waiting = seen.waiting * service_s / max(service_s, policy.start_s, 10.0)
        if not used and not seen.waiting:
            return 0
        return math.ceil((used + policy.sure * math.sqrt(used) + waiting) / policy.places - 1e-9)

    def _rate_per_s(self) -> float:
        """Return the rate of arrivals over the window."""
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
