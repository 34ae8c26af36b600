"""Demand as it was seen: for each fleet size, how many requests would have been late, over windows of the past.

The demand is the number of slots that the arriving requests would occupy if none waited: each occupies one for the
service time. A fleet of n replicas is late for the share of the requests beyond its slots. So one pass over the
arrivals tells what every fixed size would have attained, whatever the fleet's size was.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from powerband.serve.autoscaling.policy import ScalingPolicy
from powerband.serve.autoscaling.snapshot import FleetSnapshot

BIN_S = 5.0
_GROWTH = 1.04  # between two sizes that are compared
_MEMORY_S = 7 * 86400.0  # the weight of what was seen halves in about five days
_LOADED = 0.7  # busy slots from which a measured service time counts
_PRIOR_REQUESTS = 30.0  # weight of the service time that the recipe implies


@dataclass(frozen=True)
class Lateness:
    """Requests of a span of time, and how many would have been late with each size."""

    span_s: float
    requests: float
    late: tuple[float, ...]


class DemandHistory:
    """Counts the requests that each size would have been late for, in bins of which the last `bins` are kept."""

    def __init__(self, policy: ScalingPolicy, *, bins: int) -> None:
        self.sizes = compared_sizes(policy.min_replicas, policy.max_replicas)
        self.slots_used = 0.0  # by the arriving requests, if none waited
        self._slots = policy.slots
        self._service_s, self._busy_slot_s, self._completed = policy.service_s, 0.0, 0.0
        self._bin, self._bin_requests, self._bin_s = [0.0] * len(self.sizes), 0.0, 0.0
        self._all = Lateness(0.0, 0.0, tuple(self._bin))
        self._bins = deque([self._all], maxlen=bins)  # each is the sum from the first to the end of this bin

    @property
    def service_s(self) -> float:
        """Return the mean time that a request occupies a slot of a busy replica."""
        measured = self._busy_slot_s + _PRIOR_REQUESTS * self._service_s
        return measured / (self._completed + _PRIOR_REQUESTS)

    def observe(self, last: FleetSnapshot, now: FleetSnapshot) -> bool:
        """Add the time between two snapshots; return whether it completed a bin."""
        seconds, arrived = now.at_s - last.at_s, now.arrived - last.arrived
        if now.ready and now.running >= _LOADED * self._slots * now.ready:
            self._busy_slot_s += now.running * seconds
            self._completed += max(0, _completed(now) - _completed(last))
        service_s = self.service_s
        stay = math.exp(-seconds / service_s)
        self.slots_used = self.slots_used * stay + arrived * service_s / seconds * (1 - stay)
        if arrived:
            needed = self.slots_used / self._slots
            for index in range(bisect_left(self.sizes, needed)):
                self._bin[index] += arrived * (1 - self.sizes[index] / needed)
        self._bin_requests, self._bin_s = self._bin_requests + arrived, self._bin_s + seconds
        if self._bin_s < BIN_S - 1e-9:
            return False
        self._close_bin()
        return True

    def lateness(self, replicas: int, last: FleetSnapshot, now: FleetSnapshot) -> float:
        """Return how many of the requests between two snapshots are late with this many replicas, by this model."""
        capacity = replicas * self._slots
        if self.slots_used <= capacity:
            return 0.0
        return (now.arrived - last.arrived) * (1 - capacity / self.slots_used)

    def everything(self) -> Lateness:
        """Return the whole history; what is older weighs less."""
        return self._all

    def recent(self, count: int) -> Lateness:
        """Return the sum of the last bins."""
        end = self._bins[-1]
        begin = self._bins[max(0, len(self._bins) - 1 - count)]
        late = tuple(later - earlier for later, earlier in zip(end.late, begin.late, strict=True))
        return Lateness(end.span_s - begin.span_s, end.requests - begin.requests, late)

    def _close_bin(self) -> None:
        self._bins.append(_sum(self._bins[-1], self._bin_s, self._bin_requests, self._bin, weight=1.0))
        weight = math.exp(-self._bin_s / _MEMORY_S)
        self._all = _sum(self._all, self._bin_s, self._bin_requests, self._bin, weight=weight)
        self._bin, self._bin_requests, self._bin_s = [0.0] * len(self.sizes), 0.0, 0.0


def compared_sizes(min_replicas: int, max_replicas: int) -> list[int]:
    """Return the sizes that are compared: all small ones, and for large fleets some between."""
    found, size = [], min_replicas
    while size < max_replicas:
        found.append(size)
        size = max(size + 1, int(size * _GROWTH))
    return [*found, max_replicas]


def _sum(before: Lateness, seconds: float, requests: float, late: list[float], *, weight: float) -> Lateness:
    total = tuple(weight * old + new for old, new in zip(before.late, late, strict=True))
    return Lateness(weight * before.span_s + seconds, weight * before.requests + requests, total)


def _completed(snapshot: FleetSnapshot) -> int:
    return snapshot.arrived - snapshot.waiting - snapshot.running - snapshot.rejected
