"""A comparison of two measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from powerband.core.statistics import Interval

DifferenceVerdict = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Difference:
    """One percentile of one metric at one load in both measurements; `ratio` is second / first."""

    load: str
    metric: str
    percentile: str
    first_s: float
    second_s: float
    ratio: Interval
    verdict: DifferenceVerdict


@dataclass
class Comparison:
    """The result of `diff`."""

    obstacles: list[str] = field(default_factory=list)  # reasons why the two are not comparable
    notes: list[str] = field(default_factory=list)  # differences in provenance
    differences: list[Difference] = field(default_factory=list)

    @property
    def different(self) -> bool:
        """Return whether any percentile differs significantly and by more than the margin."""
        return any(one.verdict != "same" for one in self.differences)
