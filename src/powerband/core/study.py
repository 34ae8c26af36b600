"""A study, which is one search over deployments, and its trials, one deployment each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
Outcome = Literal[
    "feasible",  # its max rate is measured, and the first part of the quality check does not refuse it
    "screened",  # its max rate is estimated
    "slower",  # it misses the SLO at the rate of the best trial
    "too slow",  # it misses the SLO at every load
    "below the floor",
    "failed",
    "inconclusive",  # guards rejected every level; it is tried again
    "ruled out",  # known not to work, or its quality settings are below the floor
]
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
    estimate_per_s: Interval | None = Field(
        default=None, description="max rate estimated from closed-loop levels of a few requests, with an 80 % interval"
    )
    devices: int = Field(default=1, description="devices of the deployment, each of which is paid for")
    value: float = Field(default=0.0, description="the objective: requests within the SLO per dollar")
    expected_per_s: Interval | None = Field(default=None, description="predicted max rate, with an 80 % interval")
    quality: str = Field(default="", description="verdict of the quality check; empty: not checked")
    passed: bool = Field(
        default=False, description="it, or a trial with the same quality settings, passed the whole quality check"
    )
    kl: float | None = Field(default=None, description="mean KL divergence from the reference")
    latencies_s: dict[str, float] = Field(
        default_factory=dict, description="at the highest load that met the SLO, else at the lowest load measured"
    )
    excess: float | None = Field(
        default=None, description="latency over its SLO bound at the lowest load measured; above 1 it misses the SLO"
    )
    tries: int = Field(default=1, description="times it was measured; more than one if guards rejected every level")
    seconds: float = 0.0
    start_s: float = Field(default=0.0, description="part of `seconds` until the engine was ready")
    excluded_s: float = Field(default=0.0, description="part of `seconds` that built the variant: outside the budget")
    evidence: str = Field(default="", description="folder of its measurement, relative to the study's folder")


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the feasible trial with the highest value."""
    return max((one for one in trials if one.outcome == "feasible"), key=lambda one: one.value, default=None)


def rate_of(trial: Trial) -> float:
    """Return the measured max rate of a trial, else its estimate, else 0."""
    return trial.max_rate_per_s or (trial.estimate_per_s.value if trial.estimate_per_s else 0.0)


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
    usd_per_h: float = Field(default=1.0, gt=0, description="of one device")
    levers: dict[str, dict[str, tuple[str, ...]]] = Field(
        default_factory=dict, description="settings of each lever, by engine; the default first"
    )
    drafts: tuple[SpeculationResult, ...] = Field(
        default=(), description="speculation measured for workloads with a dataset"
    )
    trials: tuple[Trial, ...] = ()
    outlook: str = Field(default="", description="what another hour of search can find")

    @property
    def best(self) -> Trial | None:
        """Return the best trial."""
        return best(self.trials)

    @property
    def configurations(self) -> int:
        """Return the size of the search space."""
        return sum(math.prod(len(settings) for settings in levers.values()) for levers in self.levers.values())

    @property
    def nearest(self) -> Trial | None:
        """Return the trial that came nearest to the SLO, else the fastest of those below the quality floor."""
        late = [one for one in self.trials if one.excess and one.outcome in ("too slow", "slower", "screened")]
        if late:
            return min(late, key=lambda one: one.excess or math.inf)
        return max((one for one in self.trials if one.outcome == "below the floor"), key=rate_of, default=None)

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
