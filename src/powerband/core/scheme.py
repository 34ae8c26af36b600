"""A quantization scheme: how many bits each part of a model takes, and the data type of its multiplications."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field

from powerband.core.document import Document
from powerband.core.shape import Shape


class Scheme(Document):
    """Bits per parameter of each part of a model, scales included, and the data type it is multiplied in."""

    kind: ClassVar[str] = "scheme"

    format: Literal["safetensors", "gguf"]
    linear_bits: float = Field(description="of attention and feed-forward weights")
    experts_bits: float | None = Field(default=None, description="of routed experts; default: linear_bits")
    embedding_bits: float = 16
    head_bits: float = Field(default=16, description="of the output embedding (LM head)")
    router_bits: float = 16
    computes_in: str = Field(default="bf16", description="the data type of the multiplications")
    faster_with: dict[str, str] = Field(
        default_factory=dict,
        description="data type of the multiplications (value) on a device that supports a data type (key)",
    )
    published_as: tuple[str, ...] = Field(default=(), description="its names in quantization_config or a GGUF header")
    group: str = Field(default="", description="schemes of one group have about the same size and speed")
    risky: str = Field(default="", description="why `plan` and `tune` use it only if it is named with --scheme")
    source: str = ""

    def compute_dtype(self, supported: Collection[str]) -> str:
        """Return the data type of the multiplications on a device that supports these data types."""
        return next((better for has, better in self.faster_with.items() if has in supported), self.computes_in)

    def weight_only(self) -> Scheme:
        """Return the scheme on a device where it saves memory, but multiplies in 16 bits."""
        return self.model_copy(update={"computes_in": "bf16", "faster_with": {}})

    def expert_bits(self) -> float:
        """Return the bits per parameter of a routed expert."""
        return self.experts_bits if self.experts_bits is not None else self.linear_bits

    def weight_bytes(self, shape: Shape, *, with_mtp: bool = False) -> float:
        """Return the size of a model's weights; `with_mtp` includes its multi-token prediction heads."""
        tied = self.head_bits if shape.tied and self.format == "gguf" else self.embedding_bits
        bits = shape.embedding * tied + shape.head * self.head_bits + 16 * (2 * shape.depth + 1) * shape.hidden
        for one in shape.layers:
            each = (one.attention + one.dense) * self.linear_bits + one.router * self.router_bits
            bits += one.count * (each + one.expert * one.experts * self.expert_bits())
        return (bits + with_mtp * shape.mtp_parameters * self.expert_bits()) / 8
