"""A recipe: a pinned deployment, the promise that it keeps, where that was proven, and the evidence."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import Settings
from powerband.core.workload import Workload

MUCH_LESS = 0.8  # of a share that was proven: so little is told


class Range(Value):
    """Between which values a quantity of the traffic lay while the promise was kept."""

    low: float
    high: float


class Promised(Value):
    """What the recipe keeps, as it was kept on requests that the search never saw."""

    slo: SLO
    rate_per_s: float
    attainment: Interval = Field(description="share of requests within every bound, at that rate")
    quality: QualityFloor | None = Field(default=None, description="the floor that the whole gate let it pass")
    memory_bytes: int | None = Field(default=None, description="that the engine took at most")
    in_flight: int | None = Field(default=None, description="requests at once, at most, while it was kept")
    prefix_hit_share: float | None = Field(default=None, description="of the prompt tokens, as the engine counts")
    spec_accepted_share: float | None = Field(default=None, description="of the guessed tokens")

    def shares(self) -> list[tuple[str, str, float]]:
        """Return what was proven of the engine's counters: a part, the whole, and the share."""
        found = [
            ("prefix_hits_tokens", "prefix_queries_tokens", self.prefix_hit_share),
            ("spec_accepted_tokens", "spec_drafted_tokens", self.spec_accepted_share),
        ]
        return [(part, whole, share) for part, whole, share in found if share]


class BaselineComparison(Value):
    """How the recipe's knee compares with another's, measured in turns on the same requests."""

    renamed_keys = {"knee_per_s": "max_rate_per_s"}

    name: str
    settings: Settings
    max_rate_per_s: float | None = Field(description="None: it kept the SLO at no rate, or was not measured")
    why: str = Field(default="", description="why it was not measured")
    ratio: Interval | None = Field(description="the recipe's over this one's")


class Recipe(Document):
    """The answer of `tune`."""

    kind: ClassVar[str] = "recipe"
    renamed_keys = {"says": "summary", "against": "baselines", "waterfall": "ablation"}

    summary: str = Field(description="the answer in a sentence")
    model: str = Field(description="path of the published weights")
    model_digest: str = Field(description="SHA-256 of them")
    scheme: str = Field(description="the number format that won")
    weights_digest: str = Field(description="SHA-256 of the weights in that format")
    engine_version: str
    deployment: dict[str, Any] = Field(description="what is served, as a deployment.yaml")
    reference: dict[str, Any] = Field(default_factory=dict, description="the deployment that answers are held against")
    settings: Settings = Field(description="by lever")
    promise: Promised
    workload: Workload = Field(description="the traffic that it was proven with")
    validity: dict[str, Range] = Field(description="of the traffic in which it was proven")
    usd_per_h: float
    usd_per_1m_tokens: float
    baselines: tuple[BaselineComparison, ...] = Field(default=(), description="each engine's defaults")
    ablation: tuple[BaselineComparison, ...] = Field(
        default=(), description="the recipe with one lever turned back each"
    )
    command: str = Field(description="starts the same engine without Powerband")
    evidence: dict[str, str] = Field(default_factory=dict, description="SHA-256 of each file of the study")
    provenance: dict[str, Any] = Field(default_factory=dict, description="machine, versions, date")
