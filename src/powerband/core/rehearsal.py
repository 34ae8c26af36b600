"""A rehearsal: what a study would take and find, played in virtual time."""

from __future__ import annotations

from statistics import fmean, median

from pydantic import Field

from powerband.core.document import Value
from powerband.core.statistics import Interval
from powerband.core.study import Settings

_NEAR = 0.95  # of the best requests per dollar


class Play(Value):
    """One study in virtual time."""

    duration_s: float
    looked: int = Field(description="configurations that were started")
    winner: Settings | None = None
    found: float = Field(description="the winner's requests per dollar over those of the best configuration")


class LikelyWinner(Value):
    """A configuration that may be the best, and in which share of the draws it is."""

    settings: Settings
    share: float


class Rehearsal(Value):
    """What a study would take and find."""

    model: str
    first_line: str = Field(description="the expected duration that tune prints first")
    devices: int = Field(description="of the machine, all of which are rented")
    usd_per_h: float = Field(description="of one device")
    plays: tuple[Play, ...]
    likely: tuple[LikelyWinner, ...]
    max_rate_per_s: Interval = Field(description="of the recipe, with an 80 % interval")
    usd_per_1m_requests: Interval = Field(description="of the recipe, with an 80 % interval")
    defaults: dict[str, Settings]
    assumptions: tuple[str, ...]

    @property
    def duration_s(self) -> Interval:
        """Return the median duration, and the shortest and longest."""
        ordered = sorted(one.duration_s for one in self.plays)
        return Interval(median(ordered), ordered[0], ordered[-1])

    @property
    def device_hours(self) -> Interval:
        """Return the hours of all devices of the machine."""
        found, per_s = self.duration_s, self.devices / 3600
        return Interval(per_s * found.value, per_s * found.low, per_s * found.high)

    @property
    def usd(self) -> Interval:
        """Return the cost of renting the whole machine for the study."""
        found = self.device_hours
        return Interval(*(self.usd_per_h * one for one in (found.value, found.low, found.high)))

    @property
    def near_best(self) -> int:
        """Return in how many plays the recipe is within 5 % of the best requests per dollar."""
        return sum(one.found >= _NEAR for one in self.plays)

    @property
    def mean_found(self) -> float:
        """Return the mean of the recipes' requests per dollar over those of the best configuration."""
        return fmean(one.found for one in self.plays)
