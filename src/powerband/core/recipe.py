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


class Against(Value):
    """How the recipe's knee compares with another's, measured in turns on the same requests."""

    name: str
    settings: Settings
    knee_per_s: float | None = Field(description="None: it kept the SLO at no rate")
    ratio: Interval | None = Field(description="the recipe's over this one's")


class Recipe(Document):
    """The answer of `tune`."""

    kind: ClassVar[str] = "recipe"

    says: str
    model: str
    model_digest: str
    scheme: str
    weights_digest: str
    engine_version: str
    deployment: dict[str, Any]
    reference: dict[str, Any] = Field(default_factory=dict, description="the deployment that answers are held against")
    settings: Settings
    promise: Promised
    workload: Workload
    validity: dict[str, Range] = Field(description="of the traffic in which it was proven")
    usd_per_h: float
    usd_per_1m_tokens: float
    against: tuple[Against, ...] = Field(default=(), description="each engine's defaults")
    waterfall: tuple[Against, ...] = Field(default=(), description="the recipe with one lever turned back each")
    command: str
    evidence: dict[str, str] = Field(default_factory=dict, description="SHA-256 of each file of the study")
    provenance: dict[str, Any] = Field(default_factory=dict)
