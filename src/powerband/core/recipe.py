"""A recipe: a pinned deployment, the SLO and rate it was validated at, its validity region, and the evidence."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from pydantic import Field, model_validator

from powerband.core.device import Vendor
from powerband.core.document import Document, Value
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import Settings
from powerband.core.workload import Workload

ALERT_RATIO = 0.8  # a counter share below this fraction of its validated value raises an alert

RECIPE_LABEL = "powerband.dev/recipe"
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LABEL_CHARS = 63


def label_value(name: str) -> str:
    """Return a name as the value of a Kubernetes label."""
    return _NOT_IN_LABELS.sub("-", name)[:_MAX_LABEL_CHARS].strip("-._")


class Range(Value):
    """Range of one traffic property during validation."""

    low: float
    high: float


class Promised(Value):
    """The SLO, rate and quality floor the recipe met on held-out requests, and the resources it used."""

    slo: SLO
    rate_per_s: float
    attainment: Interval = Field(description="share of requests within every bound of the SLO, at that rate")
    quality: QualityFloor | None = Field(default=None, description="the floor of the full quality check it passed")
    memory_bytes: int | None = Field(default=None, description="peak memory of the engine")
    in_flight: int | None = Field(default=None, description="peak number of concurrent requests")
    prefix_hit_share: float | None = Field(
        default=None, description="share of prompt tokens found in the engine's prefix cache"
    )
    spec_accepted_share: float | None = Field(default=None, description="share of draft tokens that were accepted")

    def proven_shares(self) -> list[tuple[str, str, float]]:
        """Return the validated counter shares: the name of the part, the name of the whole, and the share."""
        found = [
            ("prefix_hits_tokens", "prefix_queries_tokens", self.prefix_hit_share),
            ("spec_accepted_tokens", "spec_drafted_tokens", self.spec_accepted_share),
        ]
        return [(part, whole, share) for part, whole, share in found if share]


class BaselineComparison(Value):
    """Max rate of the recipe against another deployment, from interleaved runs on the same held-out requests."""

    renamed_keys = {"knee_per_s": "max_rate_per_s"}

    name: str
    settings: Settings
    max_rate_per_s: float | None = Field(description="None: it met the SLO at no request rate, or was not measured")
    why: str = Field(default="", description="why it was not measured")
    ratio: Interval | None = Field(description="max rate of the recipe over that of this deployment")


class Recipe(Document):
    """The result of `tune`."""

    kind: ClassVar[str] = "recipe"
    renamed_keys = {"says": "summary", "against": "baselines", "waterfall": "ablation"}

    summary: str = Field(description="the result in one sentence")
    model: str = Field(description="path of the published weights")
    model_digest: str = Field(description="SHA-256 of the published weights")
    scheme: str = Field(description="quantization scheme of the served weights")
    weights_digest: str = Field(description="SHA-256 of the served weights")
    engine_version: str
    deployment: dict[str, Any] = Field(description="the served deployment, as a deployment.yaml")
    reference: dict[str, Any] = Field(
        default_factory=dict, description="the deployment whose answers are the quality reference"
    )
    settings: Settings = Field(description="lever to setting")
    promise: Promised
    workload: Workload = Field(description="the workload of the validation")
    validity: dict[str, Range] = Field(description="range of each traffic property during validation")
    gpus: int = Field(default=0, description="GPUs of one replica; 0: it runs on cores")
    device_vendor: Vendor = Field(default="cpu", description="vendor of the devices of one replica")
    device_name: str = Field(default="", description="name of these devices, as driver or kernel report it")
    image: str = Field(default="", description="container image; default: the published image of the engine's build")
    usd_per_h: float = Field(description="of one replica")
    usd_per_1m_tokens: float
    baselines: tuple[BaselineComparison, ...] = Field(
        default=(), description="comparison with each engine's default settings"
    )
    ablation: tuple[BaselineComparison, ...] = Field(
        default=(), description="comparison with the recipe that has one lever at its default"
    )
    command: str = Field(description="command that starts the same engine without Powerband")
    evidence: dict[str, str] = Field(default_factory=dict, description="SHA-256 of each file of the study")
    provenance: dict[str, Any] = Field(default_factory=dict, description="machine, versions, date")

    @model_validator(mode="before")
    @classmethod
    def _read_gpus_of_old_files(cls, data: Any) -> Any:
        """Fill the GPUs of files that name them only in the placement, and the vendor of files that do not name it."""
        if not isinstance(data, dict):
            return data
        deployment = data.get("deployment")
        placement = deployment.get("placement") if isinstance(deployment, dict) else None
        indices = placement.get("gpus") if isinstance(placement, dict) else None
        gpus = data.get("gpus", len(indices) if isinstance(indices, list | tuple) else 0)
        return {"device_vendor": "nvidia", **data, "gpus": gpus} if gpus else data

    @property
    def label(self) -> str:
        """Return the name as a Kubernetes label value; pods with it are known to serve this recipe."""
        return label_value(self.name or "")

    @property
    def engine_build(self) -> str | None:
        """Return the build of the engine, such as cuda or cpu-torch-2.9.0; None: Powerband did not install it."""
        build: str | None = self.provenance.get("engine_build")
        return build

    @property
    def replicas(self) -> int:
        """Return the number of replicas that kept the promise together, on a machine without GPUs."""
        placement = self.deployment.get("placement")
        found = placement.get("replicas", 1) if isinstance(placement, dict) else 1
        return found if isinstance(found, int) else 1

    @property
    def devices(self) -> str:
        """Return the devices of one replica in words: '4 x NVIDIA H100 80GB HBM3'."""
        return f"{self.gpus} x {self.device_name or 'GPU'}" if self.gpus else self.device_name or "CPU"
