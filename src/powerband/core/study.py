"""A study, which is one search over deployments, and its trials, one deployment each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from powerband.core.document import Document, Value, flatten
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload

ENGINE = "engine"
Settings = dict[str, str]  # lever to setting; the engine and the weights' scheme are levers too

# Only a feasible trial, which meets the SLO and the quality floor, can win.
Outcome = Literal["feasible", "too slow", "below the floor", "failed", "ruled out"]
_RENAMED_OUTCOMES = {"kept": "feasible"}


def render_settings(settings: Settings, defaults: Mapping[str, Settings] | None = None) -> str:
    """Render settings as `vllm  weights=w8a8-int8  cores=all`: the engine, then its levers.

    `defaults` holds each engine's default settings; levers at their default are left out, and `vllm default` has none.
    """
    engine = settings.get(ENGINE, "")
    default = (defaults or {}).get(engine)
    levers = [
        f"{name}={setting}"
        for name, setting in settings.items()
        if name != ENGINE and (default is None or default.get(name) != setting)
    ]
    return f"{engine} default" if default is not None and not levers else "  ".join((engine, *levers))


class Trial(Value):
    """One deployment that was measured, or ruled out before it started, and the reason."""

    renamed_keys = {"knee_per_s": "max_rate_per_s", "aside_s": "excluded_s"}

    number: int
    settings: Settings
    outcome: Annotated[Outcome, BeforeValidator(lambda value: _RENAMED_OUTCOMES.get(value, value))]
    reason: str = ""
    max_rate_per_s: float | None = Field(default=None, description="highest request rate that meets the SLO")
    value: float = Field(default=0.0, description="the objective: requests within the SLO per dollar")
    expected_per_s: Interval | None = Field(default=None, description="predicted max rate, with an 80 % interval")
    quality: str = Field(default="", description="verdict of the quick quality check")
    passed: bool = Field(
        default=False, description="it, or a trial with the same quality settings, passed the full quality check"
    )
    kl: float | None = Field(default=None, description="mean KL divergence from the reference, quick quality check")
    latencies_s: dict[str, float] = Field(
        default_factory=dict, description="at the highest load that met the SLO, by metric and percentile"
    )
    seconds: float = 0.0
    excluded_s: float = Field(default=0.0, description="part of `seconds` that built the variant or checked quality")
    evidence: str = Field(default="", description="folder of its measurement, relative to the study's folder")


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the feasible trial with the highest value."""
    return max((one for one in trials if one.outcome == "feasible"), key=lambda one: one.value, default=None)


class SpeculationResult(Value):
    """Output speed with one speculation setting and number of concurrent users, on requests of the workload."""

    engine: str
    setting: str
    drafts: int = Field(description="draft tokens per step; 0: no speculation")
    users: int
    tokens_per_s: float
    accepted: float | None = Field(default=None, description="share of the draft tokens that were accepted")


class Study(Document):
    """The inputs of one `tune` run, and all its trials."""

    kind: ClassVar[str] = "study"

    model: str
    workload: Workload
    slo: SLO
    quality: QualityFloor | None = None
    seed: int = 0
    usd_per_h: float = Field(default=1.0, gt=0)
    levers: dict[str, dict[str, tuple[str, ...]]] = Field(
        default_factory=dict, description="settings of each lever, by engine; the default first"
    )
    drafts: tuple[SpeculationResult, ...] = Field(
        default=(), description="speculation measured for workloads with a dataset"
    )
    trials: tuple[Trial, ...] = ()

    @property
    def best(self) -> Trial | None:
        """Return the best trial."""
        return best(self.trials)

    @property
    def defaults(self) -> dict[str, Settings]:
        """Return the default settings of each engine."""
        return {
            engine: {ENGINE: engine} | {name: settings[0] for name, settings in levers.items()}
            for engine, levers in self.levers.items()
        }

    def to_records(self) -> list[dict[str, Any]]:
        """Return a flat row for each of the trials."""
        rows = (one.model_dump(mode="json", exclude=None) for one in self.trials)
        return [flatten(row) for row in rows]


def typical_trial_s(trials: Sequence[Trial]) -> float:
    """Return the median duration of a feasible trial without its excluded time; 0 if there is none."""
    return statistics.median([one.seconds - one.excluded_s for one in trials if one.outcome == "feasible"] or [0.0])
