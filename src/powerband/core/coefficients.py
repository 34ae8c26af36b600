"""Coefficients: what an engine makes of a device, fitted to measurements; kept apart from what datasheets say."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value

Share = Annotated[float, Field(gt=0)]


class Spread(Value):
    """By how much measured latencies differed from predicted ones: the factors that hold 80 % of them."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)
    of: int = Field(default=0, description="measured points behind it")


class Coefficients(Document):
    """The shares of a datasheet's figures that an engine reaches, and what it adds to every step."""

    kind: ClassVar[str] = "coefficients"

    engine: str
    devices: tuple[str, ...] = Field(default=(), description="makers or names; the first file that fits is used")
    scheme: str | None = Field(default=None, description="the number format they were measured in; None: any")
    bandwidth: Share = Field(default=0.8, description="of the memory bandwidth, when weights are read")
    kv_bandwidth: Share = Field(default=0.6, description="of the memory bandwidth, when the KV cache is read")
    compute: Share = Field(default=0.6, description="of the operations per second, with weights")
    compute_in: dict[str, Share] = Field(default_factory=dict, description="the same, where a number format differs")
    unpacking: Share = Field(
        default=1.0, description="what weights of fewer bits than they are multiplied in reach of it"
    )
    experts: Share = Field(default=1.0, description="what routed experts reach of that")
    experts_bandwidth: Share = Field(default=1.0, description="what routed experts reach of the bandwidth's share")
    experts_layer_s: float = Field(default=0.0, ge=0, description="added to every step, for each layer, by routing")
    attention: Share = Field(default=0.3, description="of the bf16 operations per second, in attention")
    overlap: float = Field(
        default=4.0, ge=1, description="1: reading and computing add up; more: the slower one counts"
    )
    step_s: float = Field(default=0.0, ge=0, description="added to every step")
    layer_s: float = Field(default=0.0, ge=0, description="added to every step, for each layer")
    sequence_s: float = Field(default=0.0, ge=0, description="added to every step, for each answer")
    prompt_s: float = Field(default=0.0, ge=0, description="added to the step in which a prompt ends")
    apart: bool = Field(default=False, description="a step reads prompts and writes answers one after the other")
    batches: dict[int, float] = Field(
        default_factory=dict, description="what a step that writes so many answers takes of all that; between, a line"
    )
    traffic: Share = Field(default=1.0, description="what steps for unlike requests take, over steps for equal ones")
    round_s: float = Field(default=0.0, ge=0, description="for each message that all devices wait for")
    link: Share = Field(default=0.6, description="of the link's bandwidth, when partial sums are added up")
    exchange: Share = Field(default=0.4, description="of the link's bandwidth, when tokens go to experts elsewhere")
    mixing: float = Field(default=1.0, ge=0, description="part of others' prompts that a user's answer waits for")
    queue: float = Field(default=0.3, ge=0, description="prompts ahead of one's own, among so many users ...")
    queue_power: float = Field(default=0.4, ge=0, description="... to this power")
    under_way: float = Field(default=0.5, ge=0, description="steps that a prompt waits for before it is looked at")
    request_s: float = Field(default=0.0, ge=0, description="before a request reaches the queue")
    ttft: Spread = Spread(low=0.5, high=2.0)
    tpot: Spread = Spread(low=0.5, high=2.0)
    source: str = ""
