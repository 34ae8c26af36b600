"""A plan: candidate deployments ranked by predicted cost, and every rejected option with its reason."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value, flatten
from powerband.core.evidence import ExpectedQuality
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload


class OfferedDevices(Value):
    """The devices of one kind that a plan may use."""

    device: str
    description: str = ""
    requested_as: str = Field(default="", description="the name that was given, where it is not the device's own name")
    count: int
    usd_per_h: float = Field(description="of one device")


class Memory(Value):
    """How the memory of each device of a replica is used, in bytes, and how much the KV cache holds."""

    renamed_keys = {"longest": "max_sequence_tokens"}

    device: int
    weights: int
    activations: int
    overhead: int
    kv_cache: int
    kv_per_token: float = Field(description="KV-cache bytes per token on one device, at the longest context")
    max_sequence_tokens: int = Field(description="the longest single sequence that fits in the KV cache")
    sequences: int = Field(description="sequences of the workload's mean length that fit at once")


class Candidate(Value):
    """One way to serve the model and its predicted performance. Intervals hold 80 % of past prediction errors."""

    renamed_keys = {"bound_by": "limited_by", "known": "basis", "priced": "price_source"}

    device: str
    devices: int = Field(description="devices per replica")
    engine: str
    scheme: str
    kv_format: str
    split: str
    memory: Memory
    sequences: int
    goodput_per_s: Interval = Field(
        description="highest rate of one replica that meets the SLO, in requests per second"
    )
    ttft_s: dict[str, Interval] = Field(default_factory=dict, description="by percentile, at that rate")
    tpot_s: dict[str, Interval] = Field(default_factory=dict, description="by percentile, at that rate")
    replicas: int = Field(default=1, description="replicas needed for the requested load")
    fleet_replicas: int | None = Field(
        default=None, description="replicas that fit on all offered devices; None if a load was requested"
    )
    fleet_per_s: Interval | None = Field(default=None, description="the rate of all these replicas together")
    fleet_usd_per_h: float | None = Field(default=None, description="the price of all these replicas together")
    usd_per_h: float = Field(description="price of one replica")
    usd_per_1m_input: float
    usd_per_1m_output: float
    usd_per_1m_tokens: Interval = Field(description="input and output tokens together")
    limited_by: str = ""
    basis: str = Field(default="", description="the measurements behind the predicted times")
    price_source: str = Field(default="", description="source and date of the price")
    price_estimated: bool = Field(default=False, description="the price is an estimate of Powerband")
    documented: bool = Field(default=True, description="the engine's documentation says that it runs on this device")
    support: tuple[str, ...] = Field(default=(), description="what is documented of weights and KV cache, and where")
    quality: ExpectedQuality | None = Field(default=None, description="by published and own evidence, not a proof")
    deployment: dict[str, Any] = Field(default_factory=dict)


class Rejection(Value):
    """An option that was ruled out, and why."""

    device: str
    engine: str
    scheme: str
    what: str
    reason: str
    remedy: str = Field(default="", description="a noun phrase: what would make the option work")


class Plan(Document):
    """The result of `powerband plan`."""

    kind: ClassVar[str] = "plan"

    model: str
    workload: Workload
    slo: SLO
    floor: QualityFloor | None = Field(default=None, description="what the evidence says will fail it is rejected")
    load_per_s: float | None = None
    offers: tuple[OfferedDevices, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)

    def to_records(self) -> list[dict[str, Any]]:
        """Return a flat row for each of the candidates."""
        rows = (one.model_dump(mode="json", exclude={"deployment"}) for one in self.candidates)
        return [flatten(row) for row in rows]
