"""Coefficients: the efficiency and overheads of an engine on a device, fitted to measurements.

Datasheet facts are in `Device`; nothing in a `Coefficients` file comes from a datasheet.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value

Share = Annotated[float, Field(gt=0)]


class Spread(Value):
    """The factors between which 80 % of the ratios of measured to predicted latency fall."""

    renamed_keys = {"of": "points"}

    low: float = Field(gt=0)
    high: float = Field(gt=0)
    points: int = Field(default=0, description="number of measured points")


class Coefficients(Document):
    """What an engine reaches of a device's datasheet figures, and what it adds to every step."""

    kind: ClassVar[str] = "coefficients"
    renamed_keys = {
        "apart": "separate_prefill_decode",
        "batches": "batch_size_factors",
        "compute_in": "compute_by_format",
        "exchange": "all_to_all_bandwidth",
        "experts": "experts_compute",
        "link": "all_reduce_bandwidth",
        "mixing": "prefill_interference",
        "queue": "queue_factor",
        "queue_power": "queue_exponent",
        "round_s": "collective_s",
        "traffic": "mixed_load_factor",
        "under_way": "steps_before_prefill",
        "unpacking": "weight_only_compute",
    }

    engine: str
    engine_version: str = Field(default="", description="version that was measured; empty: not known")
    devices: tuple[str, ...] = Field(default=(), description="device names or vendors; the first matching file is used")
    scheme: str | None = Field(default=None, description="quantization scheme of the measured weights; None: any")
    bandwidth: Share = Field(default=0.8, description="share of the memory bandwidth reached when reading weights")
    kv_bandwidth: Share = Field(default=0.6, description="share of the memory bandwidth reached when reading KV cache")
    compute: Share = Field(default=0.6, description="share of the peak FLOPS reached when multiplying with weights")
    compute_by_format: dict[str, Share] = Field(
        default_factory=dict, description="overrides `compute` for a data type: fp8, fp4, ..."
    )
    weight_only_compute: Share = Field(
        default=1.0, description="share of `compute` reached when weights are dequantized before the multiplication"
    )
    experts_compute: Share = Field(default=1.0, description="share of `compute` reached by routed experts")
    experts_bandwidth: Share = Field(default=1.0, description="share of `bandwidth` reached with routed experts")
    experts_layer_s: float = Field(default=0.0, ge=0, description="added to every step for each layer, by routing")
    attention: Share = Field(default=0.3, description="share of the peak bf16 FLOPS reached in attention")
    overlap: float = Field(
        default=4.0, ge=1, description="1: reading weights and computing add up; higher: the slower one dominates"
    )
    step_s: float = Field(default=0.0, ge=0, description="added to every step")
    layer_s: float = Field(default=0.0, ge=0, description="added to every step for each layer")
    sequence_s: float = Field(default=0.0, ge=0, description="added to every step for each sequence")
    prompt_s: float = Field(default=0.0, ge=0, description="added to a step for each prompt whose prefill ends in it")
    separate_prefill_decode: bool = Field(
        default=False, description="prefill and decode run one after the other, not in one batch"
    )
    batch_size_factors: dict[int, float] = Field(
        default_factory=dict,
        description="decode step time relative to the roofline, by batch size; interpolated linearly",
    )
    mixed_load_factor: Share = Field(
        default=1.0, description="step time with requests of mixed lengths relative to requests of equal length"
    )
    tpot_tail: Share = Field(
        default=1.0, description="p90 of TPOT under mixed load relative to the simulated one; for p75 and above"
    )
    collective_s: float = Field(default=0.0, ge=0, description="latency of one collective operation between devices")
    all_reduce_bandwidth: Share = Field(default=0.6, description="share of the link bandwidth reached by all-reduce")
    all_to_all_bandwidth: Share = Field(
        default=0.4, description="share of the link bandwidth reached when tokens are sent to experts on other devices"
    )
    prefill_interference: float = Field(
        default=1.0, ge=0, description="share of other requests' prefill time that delays a decoding request"
    )
    queue_factor: float = Field(
        default=0.3, ge=0, description="prompts queued ahead are queue_factor * concurrency ** queue_exponent"
    )
    queue_exponent: float = Field(default=0.4, ge=0, description="see queue_factor")
    steps_before_prefill: float = Field(
        default=0.5, ge=0, description="decode steps that pass before the prefill of a new prompt starts"
    )
    request_s: float = Field(default=0.0, ge=0, description="time before a request reaches the engine's queue")
    ttft: Spread = Spread(low=0.5, high=2.0)
    tpot: Spread = Spread(low=0.5, high=2.0)
    source: str = ""
