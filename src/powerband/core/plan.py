"""A plan: candidate deployments ranked by prediction, each with its interval, and every rejection with its reason."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload


class Memory(Value):
    """What lies on each device of a replica, in bytes, and what its KV cache has room for."""

    device: int
    weights: int
    activations: int
    overhead: int
    kv_cache: int
    kv_per_token: float = Field(description="of the model's longest context, on one device")
    longest: int = Field(description="tokens that a single sequence may have")
    sequences: int = Field(description="sequences of the workload's mean length that fit at once")


class Candidate(Value):
    """One way to serve, and what it is predicted to do. Intervals hold 80 %."""

    renamed_keys = {"bound_by": "limited_by"}

    device: str
    devices: int = Field(description="of one replica")
    engine: str
    scheme: str
    kv_format: str
    split: str
    memory: Memory
    sequences: int
    goodput_per_s: Interval = Field(description="requests per second and replica at which the SLO is just kept")
    ttft_s: dict[str, Interval] = Field(default_factory=dict, description="at that rate, by percentile")
    tpot_s: dict[str, Interval] = Field(default_factory=dict)
    replicas: int = Field(default=1, description="for the load that was asked for")
    usd_per_h: float = Field(description="of one replica")
    usd_per_1m_input: float
    usd_per_1m_output: float
    usd_per_1m_tokens: Interval = Field(description="input and output together")
    limited_by: str = ""
    known: str = Field(default="", description="what its prediction rests on")
    priced: str = Field(default="", description="where its price comes from, and when")
    deployment: dict[str, Any] = Field(default_factory=dict)


class Rejection(Value):
    """What was ruled out, and why."""

    device: str
    engine: str
    scheme: str
    what: str
    reason: str
    remedy: str = ""


class Plan(Document):
    """The answer of `plan`."""

    kind: ClassVar[str] = "plan"

    model: str
    workload: Workload
    slo: SLO
    load_per_s: float | None = None
    candidates: tuple[Candidate, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)
