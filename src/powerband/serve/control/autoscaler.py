"""Autoscaler: the number of replicas, computed from queue length, running requests and arrival rate.

Load is counted in slots in use: arrival rate times mean service time. The autoscaler asks for enough replicas to hold
that load, a margin for random variation, and the queue. It scales up at once. It scales down only after the lower
number has been enough for `scale_down_delay_s`, which grows with the start time, because an early scale-down costs one
start. The clock is an input, so the same snapshots always give the same decisions.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingPolicy:
    """One replica's measured capacity, and the user's limits on the number of replicas."""

    rate_per_s: float  # highest rate that one replica sustains within the SLO
    slots: int  # requests that one replica serves concurrently
    start_s: float  # measured start time of a replica
    min_replicas: int = 1
    max_replicas: int = 100

    @property
    def scale_down_delay_s(self) -> float:
        """Return how long fewer replicas must have been enough before one is stopped."""
        return max(10.0, 10.0 * self.start_s)

    @property
    def headroom_deviations(self) -> float:
        """Return the margin, in standard deviations of the slots in use: smaller where replicas start quickly."""
        return min(1.0, self.start_s / 60)

    @property
    def rate_window_s(self) -> float:
        """Return the averaging window of the arrival rate: long enough to be precise, short enough to follow it."""
        return max(15.0, min(60.0, self.start_s))


@dataclass(frozen=True)
class FleetSnapshot:
    """Replicas and requests of one model at one moment."""

    at_s: float
    ready: int
    starting: int
    waiting: int
    running: int
    arrived: int  # requests since the start


class Autoscaler:
    """Applies a scaling policy to a series of snapshots."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self._arrivals: deque[tuple[float, int]] = deque()  # within the rate window
        self._needs: deque[tuple[float, int]] = deque()  # within the scale-down delay, highest first

    def desired_replicas(self, snapshot: FleetSnapshot) -> int:
        """Return how many replicas there should be."""
        policy = self.policy
        if not self._arrivals:  # keep the initial size for one delay: nothing is known about the load yet
            self._needs.append((snapshot.at_s, snapshot.ready + snapshot.starting))
        self._arrivals.append((snapshot.at_s, snapshot.arrived))
        while len(self._arrivals) > 2 and self._arrivals[1][0] <= snapshot.at_s - policy.rate_window_s:
            self._arrivals.popleft()
        need = self._current_need(snapshot)
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((snapshot.at_s, need))
        while self._needs[0][0] < snapshot.at_s - policy.scale_down_delay_s:
            self._needs.popleft()
        return max(policy.min_replicas, min(policy.max_replicas, self._needs[0][1]))

    def _current_need(self, snapshot: FleetSnapshot) -> int:
        """Return how many replicas have enough slots for the arriving and the queued requests."""
        policy = self.policy
        service_s = policy.slots / policy.rate_per_s
        used = max(self._rate_per_s() * service_s, float(snapshot.running))
        waiting = snapshot.waiting * service_s / max(service_s, policy.start_s, 10.0)
        if not used and not snapshot.waiting:
            return 0
        return math.ceil((used + policy.headroom_deviations * math.sqrt(used) + waiting) / policy.slots - 1e-9)

    def _rate_per_s(self) -> float:
        """Return the arrival rate over the window."""
        (first_s, first), (last_s, last) = self._arrivals[0], self._arrivals[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
