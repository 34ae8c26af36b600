"""A study: a search over deployments; and a trial: one deployment tried."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from powerband.core.document import Document, Value
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload

Settings = dict[str, str]  # of every lever; the engine and the scheme are levers too

# What can become of a trial. Only one that kept both promises may win.
Outcome = Literal["feasible", "too slow", "below the floor", "failed", "ruled out"]
_RENAMED_OUTCOMES = {"kept": "feasible"}


class Trial(Value):
    """One deployment tried, or ruled out before it was started, and why."""

    renamed_keys = {"knee_per_s": "max_rate_per_s", "aside_s": "excluded_s"}

    number: int
    settings: Settings
    outcome: Annotated[Outcome, BeforeValidator(lambda value: _RENAMED_OUTCOMES.get(value, value))]
    reason: str = ""
    max_rate_per_s: float | None = Field(default=None, description="requests per second at which the SLO just holds")
    value: float = Field(default=0.0, description="of the objective; nothing where a promise was broken")
    expected_per_s: Interval | None = Field(default=None, description="what the plan expects; holds 80 %")
    quality: str = Field(default="", description="what the cheap gate said")
    passed: bool = Field(default=False, description="the whole gate let it pass, or one that answers alike")
    kl: float | None = Field(default=None, description="mean divergence from the reference, by the cheap gate")
    latencies_s: dict[str, float] = Field(default_factory=dict, description="at the highest load that held, in words")
    seconds: float = 0.0
    excluded_s: float = Field(default=0.0, description="of these: to make the variant, and to ask the gate")
    evidence: str = Field(default="", description="the folder of its measurement, in that of the study")


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the highest value among those that keep both promises."""
    return max((one for one in trials if one.outcome == "feasible"), key=lambda one: one.value, default=None)


class SpeculationResult(Value):
    """What drafts brought on the workload's own requests, so many users at once, answers ending where they end."""

    engine: str
    setting: str
    drafts: int = Field(description="tokens guessed for each step; 0: none")
    users: int
    tokens_per_s: float
    accepted: float | None = Field(default=None, description="share of the guessed tokens")


class Study(Document):
    """What `tune` was asked, and everything that it tried."""

    kind: ClassVar[str] = "study"

    model: str
    workload: Workload
    slo: SLO
    quality: QualityFloor | None = None
    seed: int = 0
    usd_per_h: float = Field(default=1.0, gt=0)
    levers: dict[str, dict[str, tuple[str, ...]]] = Field(default_factory=dict, description="by engine; default first")
    drafts: tuple[SpeculationResult, ...] = Field(default=(), description="where the workload has texts of its own")
    trials: tuple[Trial, ...] = ()

    @property
    def best(self) -> Trial | None:
        """Return the best trial."""
        return best(self.trials)


def usual_s(trials: Sequence[Trial]) -> float:
    """Return how long it takes to start a deployment that works and to find its knee; 0 where none has."""
    return statistics.median([one.seconds - one.excluded_s for one in trials if one.outcome == "feasible"] or [0.0])
