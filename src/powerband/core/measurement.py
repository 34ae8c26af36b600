"""A measurement: the result of one `bench` run, with confidence intervals, provenance and guard verdicts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from powerband.core.document import Document, Value, flatten
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload

# Points at which a distribution stores its quantile function, so that `diff` can compare two measurement files.
GRID = (0.0, *(number / 100 for number in range(1, 100)), 0.995, 0.999, 1.0)
_RENAMED_VERDICTS = {"kept": "met", "broken": "missed"}
_RENAMED_GUARDS = {"foreign load": "background load"}


class Distribution(Value):
    """One latency metric over the measured requests; percentiles with too few samples are left out."""

    count: int
    effective: float = Field(description="effective sample size, after autocorrelation")
    mean: Interval
    percentiles: dict[str, Interval]
    unsupported: tuple[str, ...] = ()
    grid: tuple[float, ...] = Field(description="the quantile function at fixed points (GRID)")


class SLOCheck(Value):
    """One bound of the SLO, and whether it was met."""

    metric: str
    percentile: str
    limit_s: float
    value_s: float | None = Field(description="the measured percentile; None: too few samples")
    share: Interval = Field(description="share of requests (ITL: of gaps) within the bound, with its Wilson interval")
    verdict: Annotated[
        Literal["met", "missed", "undecided"], BeforeValidator(lambda value: _RENAMED_VERDICTS.get(value, value))
    ]


class Verdict(Value):
    """The verdict of one guard."""

    guard: Annotated[str, BeforeValidator(lambda value: _RENAMED_GUARDS.get(value, value))]
    valid: bool
    sentence: str
    hint: str = ""


class Timeline(Value):
    """Client and engine gauges during the run, about once a second."""

    at_s: tuple[float, ...]
    in_flight: tuple[float, ...]
    queue_depth: tuple[float | None, ...] = ()
    running: tuple[float | None, ...] = ()
    kv_use: tuple[float | None, ...] = ()


class CrossCheck(Value):
    """One quantity as the client measured it and as the engine reports it."""

    what: str
    client: float
    engine: float

    @property
    def difference(self) -> float:
        """Return the relative difference from the engine's value."""
        return abs(self.client - self.engine) / self.engine if self.engine else 0.0


def describe_load(users: int | None, rate_per_s: float) -> str:
    """Return a load as text, such as `concurrency 1`, `32 users` or `4.5/s`."""
    if users:
        return "concurrency 1" if users == 1 else f"{users} users"
    return f"{rate_per_s:.3g}/s"


class Level(Value):
    """The measurement at one load: a request rate, or a number of closed-loop users."""

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
    answered_enough: bool = Field(default=True, description="the share of complete answers meets the SLO's `success`")
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_chunk: float
    cost_per_1m_output_tokens: float | None = Field(
        default=None, description="$ per 1M output tokens: the whole price divided by the output tokens alone"
    )
    cost_per_1m_tokens: float | None = Field(
        default=None, description="$ per 1M tokens, input and output together, as in a plan and a recipe"
    )
    latencies: dict[str, Distribution]
    expected: dict[str, dict[str, Interval]] = Field(
        default_factory=dict, description="the plan's prediction at this rate, with 80 % intervals"
    )
    client: dict[str, float]
    engine: dict[str, float] = Field(default_factory=dict)
    crosschecks: tuple[CrossCheck, ...] = ()
    timeline: Timeline
    verdicts: tuple[Verdict, ...]
    stopped_early: str | None = None
    decided: str | None = Field(
        default=None, description="the SLO counts as met before the end of the window, by a sequential test"
    )
    records: tuple[str, ...] = ()

    @property
    def failed_guards(self) -> list[Verdict]:
        """Return the verdicts of the guards that failed."""
        return [verdict for verdict in self.verdicts if not verdict.valid]

    @property
    def valid(self) -> bool:
        """Return whether every guard passed."""
        return not self.failed_guards

    @property
    def meets_slo(self) -> bool:
        """Return whether the point estimate meets every bound; `SLOCheck.verdict` considers the interval."""
        return (
            self.answered_enough
            and bool(self.slo_checks)
            and all(check.share.value >= float(check.percentile[1:]) / 100 for check in self.slo_checks)
        )

    @property
    def verdict(self) -> str:
        """Return the outcome in a few words."""
        if self.stopped_early:
            return f"stopped: {self.stopped_early}"
        if self.decided:
            return self.decided
        if self.failed_guards:
            return f"invalid: {', '.join(one.guard for one in self.failed_guards)}"
        if not self.slo_checks:
            return "valid"
        return "meets the SLO" if self.meets_slo else "misses the SLO"

    @property
    def load(self) -> str:
        """Return the load as text."""
        return describe_load(self.users, self.rate_per_s or 0.0)


class Measurement(Document):
    """The result of one `bench` run: one entry per load, with provenance."""

    kind: ClassVar[str] = "measurement"

    profile: Literal["level", "sweep", "climb"]
    workload: Workload
    slo: SLO | None = None
    levels: tuple[Level, ...]
    best: int | None = Field(default=None, description="index of the level with the highest load that meets the SLO")
    interrupted: bool = False
    startup_s: float | None = None
    price_per_h: float | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def result_level(self) -> Level | None:
        """Return the level to report: the best one, else the last valid one; None if a climb found no best."""
        if self.best is not None:
            return self.levels[self.best]
        valid = [level for level in self.levels if level.valid] or list(self.levels)
        return valid[-1] if valid and self.profile != "climb" else None

    @property
    def valid(self) -> bool:
        """Return whether the result is valid: the best level of a climb, otherwise any level."""
        if self.profile == "climb":
            return self.best is not None and self.levels[self.best].valid
        return any(level.valid for level in self.levels)

    def slo_percentile(self, metric: str) -> str:
        """Return the highest percentile that the SLO bounds for a metric; p95 if it bounds none."""
        bounds = getattr(self.slo, metric, None) or {}
        return max(bounds, key=lambda name: float(name[1:]), default="p95")

    def to_records(self) -> list[dict[str, Any]]:
        """Return a flat row for each of the levels."""
        hidden = {"timeline": True, "verdicts": True, "records": True, "slo_checks": True, "crosschecks": True}
        exclude = hidden | {"latencies": {"__all__": {"grid", "unsupported"}}}
        rows = (one.model_dump(mode="json", exclude=exclude) for one in self.levels)
        return [flatten(row) for row in rows]
