"""What a replayed trace shows: the cost of each way of scaling, and the timeline under the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingRow:
    """One way of scaling: what it cost and how many requests it served in time."""

    name: str
    replica_hours: float
    attainment: float
    late: int
    starts: int


@dataclass(frozen=True)
class ScalingSpan:
    """A span of the timeline under the autoscaler."""

    at_s: float
    rate_per_s: float
    replicas: float  # mean, with those that start
    late: int
    replica_hours: float  # since the start of the trace
