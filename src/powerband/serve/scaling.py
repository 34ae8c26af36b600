"""How many replicas, now: a pure function of what was seen, told the time.

What is asked for when a new replica is ready decides, not what is asked for now: the rate is expected as far ahead as
a start takes, with the doubt that the last arrivals leave. Fewer are kept only after nothing has called for more for a
while.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What is known of the recipe, and what the user wants."""

    rate_per_s: float  # that one replica carries with the SLO kept
    start_s: float  # measured
    least: int = 1
    most: int = 100
    patience_s: float = 1.0  # that a request may wait
    window_s: float = 60.0  # of arrivals that count
    hold_s: float = 120.0  # how long fewer must do before one is stopped
    sure: float = 1.6  # standard deviations of arrivals to be ready for


@dataclass(frozen=True)
class Seen:
    """The fleet at one moment."""

    at_s: float
    ready: int
    starting: int
    waiting: int
    running: int
    arrived: int  # in all


class Scaler:
    """The policy with its memory of arrivals."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._history: deque[tuple[float, int]] = deque()
        self._needs: deque[tuple[float, int]] = deque()  # the highest first: what was needed lately

    def wanted(self, seen: Seen) -> int:
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

    def _need(self, seen: Seen) -> int:
        """Return how many would keep the promise for as long as a start takes, and clear what waits already."""
        policy = self.policy
        rate = self._expected_per_s(seen.at_s)
        ahead_s = max(policy.start_s, policy.patience_s)
        backlog = seen.waiting / max(ahead_s, 1.0)
        if not rate and not seen.waiting and not seen.running:
            return 0
        spread = policy.sure * math.sqrt(rate / max(policy.patience_s + 1.0, 1.0))
        return max(1, math.ceil((rate + spread + backlog) / policy.rate_per_s - 1e-9))

    def _expected_per_s(self, now_s: float) -> float:
        """Return the rate when a replica that is started now would be ready: the recent one, and half of its trend."""
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        if last_s <= first_s:
            return 0.0
        long = (last - first) / (last_s - first_s)
        half_s = now_s - (last_s - first_s) / 2
        middle = next((one for one in self._history if one[0] >= half_s), self._history[-1])
        if middle[0] >= last_s or middle[0] <= first_s:
            return long
        late = (last - middle[1]) / (last_s - middle[0])
        early = (middle[1] - first) / (middle[0] - first_s)
        trend = (late - early) / ((last_s - first_s) / 2)
        return max(late + max(0.0, 0.5 * trend * self.policy.start_s), 0.0)
