"""A comparison: what differs between two measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from powerband.core.statistics import Interval

Say = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Difference:
    """One percentile of one latency in both, and the interval of the second over the first."""

    load: str
    metric: str
    percentile: str
    first_s: float
    second_s: float
    ratio: Interval
    says: Say


@dataclass
class Comparison:
    """What `diff` found."""

    obstacles: list[str] = field(default_factory=list)  # why they may not be compared
    notes: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def different(self) -> bool:
        """Tell whether any percentile differs beyond doubt and beyond the margin."""
        return any(one.says != "same" for one in self.differences)
