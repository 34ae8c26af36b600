"""A measurement: what one run of `bench` found, with its doubt, its provenance and its verdict."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from powerband.core.document import Document, Value
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload

# Where the quantile function of a distribution is kept, so that two measurements can be compared from their files.
GRID = (0.0, *(number / 100 for number in range(1, 100)), 0.995, 0.999, 1.0)
_RENAMED_VERDICTS = {"kept": "met", "broken": "missed"}


class Distribution(Value):
    """One latency over the measured requests; a percentile that the sample cannot support is not in it."""

    count: int
    effective: float = Field(description="independent samples that these are worth")
    mean: Interval
    percentiles: dict[str, Interval]
    unsupported: tuple[str, ...] = ()
    grid: tuple[float, ...] = Field(description="the quantile function at fixed points")


class SLOCheck(Value):
    """One bound of the SLO, and whether it was kept."""

    metric: str
    percentile: str
    limit_s: float
    value_s: float | None = Field(description="the measured percentile; None: the sample cannot support it")
    share: Interval = Field(description="share of requests, or of gaps, within the bound; Wilson's interval")
    verdict: Annotated[
        Literal["met", "missed", "undecided"], BeforeValidator(lambda value: _RENAMED_VERDICTS.get(value, value))
    ]


class Verdict(Value):
    """What one guard found."""

    guard: str
    valid: bool
    sentence: str
    hint: str = ""


class Timeline(Value):
    """What went on while it ran, by the second."""

    at_s: tuple[float, ...]
    in_flight: tuple[float, ...]
    queue_depth: tuple[float | None, ...] = ()
    running: tuple[float | None, ...] = ()
    kv_use: tuple[float | None, ...] = ()


class CrossCheck(Value):
    """The client's word beside the engine's on the same thing."""

    what: str
    client: float
    engine: float

    @property
    def difference(self) -> float:
        """Return by how much they differ, relative to the engine's word."""
        return abs(self.client - self.engine) / self.engine if self.engine else 0.0


def spoken(users: int | None, rate_per_s: float) -> str:
    """Return a load in words."""
    if users:
        return "one at a time" if users == 1 else f"{users} users"
    return f"{rate_per_s:.3g}/s"


class Level(Value):
    """One load, held steady and measured."""

    renamed_keys = {"promises": "slo_checks", "agreements": "crosschecks"}

    rate_per_s: float | None = None
    users: int | None = None
    seeds: tuple[int, ...]
    warmup_s: float
    window_s: float
    requests: int
    failed: int
    errors: dict[str, int] = Field(default_factory=dict)
    achieved_per_s: float
    goodput_per_s: Interval | None = None
    attainment: Interval | None = None
    slo_checks: tuple[SLOCheck, ...] = ()
    answered_enough: bool = Field(default=True, description="as many were answered in full as the SLO wants")
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_chunk: float
    cost_per_1m_output_tokens: float | None = None
    latencies: dict[str, Distribution]
    expected: dict[str, dict[str, Interval]] = Field(
        default_factory=dict, description="what a plan expects at this rate; intervals hold 80 %"
    )
    client: dict[str, float]
    engine: dict[str, float] = Field(default_factory=dict)
    crosschecks: tuple[CrossCheck, ...] = ()
    timeline: Timeline
    verdicts: tuple[Verdict, ...]
    stopped_early: str | None = None
    records: tuple[str, ...] = ()

    @property
    def refused(self) -> list[Verdict]:
        """Return what the guards that object say."""
        return [verdict for verdict in self.verdicts if not verdict.valid]

    @property
    def valid(self) -> bool:
        """Tell whether every guard lets the numbers pass."""
        return not self.refused

    @property
    def meets_slo(self) -> bool:
        """Tell whether every bound was kept, by the figure itself; the interval says how sure that is."""
        return (
            self.answered_enough
            and bool(self.slo_checks)
            and all(promise.share.value >= float(promise.percentile[1:]) / 100 for promise in self.slo_checks)
        )

    @property
    def verdict(self) -> str:
        """Say in a few words what came of it."""
        if self.stopped_early:
            return f"stopped: {self.stopped_early}"
        if self.refused:
            return f"invalid: {', '.join(one.guard for one in self.refused)}"
        if not self.slo_checks:
            return "valid"
        return "keeps the SLO" if self.meets_slo else "breaks the SLO"

    @property
    def load(self) -> str:
        """Return the load in words."""
        return spoken(self.users, self.rate_per_s or 0.0)


class Measurement(Document):
    """Distributions over the records of one run, with provenance and a validity verdict."""

    kind: ClassVar[str] = "measurement"

    profile: Literal["level", "sweep", "climb"]
    workload: Workload
    slo: SLO | None = None
    levels: tuple[Level, ...]
    best: int | None = Field(default=None, description="the level with the highest load that keeps the SLO")
    interrupted: bool = False
    startup_s: float | None = None
    price_per_h: float | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def answer(self) -> Level | None:
        """Return the level that it answers with: the best one, or the last that is valid."""
        if self.best is not None:
            return self.levels[self.best]
        valid = [level for level in self.levels if level.valid] or list(self.levels)
        return valid[-1] if valid and self.profile != "climb" else None

    @property
    def valid(self) -> bool:
        """Tell whether what it answers with may be believed: a climb's best level, some level of a sweep, the level."""
        if self.profile == "climb":
            return self.best is not None and self.levels[self.best].valid
        return any(level.valid for level in self.levels)

    def promised(self, metric: str) -> str:
        """Return the highest percentile that the SLO promises of a latency; p95 where it promises none."""
        bounds = getattr(self.slo, metric, None) or {}
        return max(bounds, key=lambda name: float(name[1:]), default="p95")
