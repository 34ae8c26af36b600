"""A scheme: a named number format, and what a model's numbers weigh in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field

from powerband.core.document import Document
from powerband.core.shape import Shape


class Scheme(Document):
    """How many bits each part of a model takes, scales included, and in which format it is multiplied."""

    kind: ClassVar[str] = "scheme"

    format: Literal["safetensors", "gguf"]
    linear_bits: float = Field(description="of attention and feed-forward weights")
    experts_bits: float | None = Field(default=None, description="of routed experts, where they differ")
    embedding_bits: float = 16
    head_bits: float = Field(default=16, description="of the output table")
    router_bits: float = 16
    computes_in: str = Field(default="bf16", description="the format of the multiplications")
    faster_with: dict[str, str] = Field(
        default_factory=dict, description="on a device that has the one format it multiplies in the other"
    )
    needs: str | None = Field(default=None, description="a device without this format cannot run it")
    published_as: tuple[str, ...] = Field(default=(), description="how quantization_config or the GGUF file calls it")
    group: str = Field(default="", description="schemes of one group are alike in size and speed")
    risky: str = Field(default="", description="why it is planned only for those who name it")
    source: str = ""

    def multiplies_in(self, formats: Collection[str]) -> str:
        """Return the format of the multiplications on a device that has these."""
        return next((better for has, better in self.faster_with.items() if has in formats), self.computes_in)

    def expert_bits(self) -> float:
        """Return the bits of a routed expert's number."""
        return self.experts_bits if self.experts_bits is not None else self.linear_bits

    def weight_bytes(self, shape: Shape, *, drafting: bool = False) -> float:
        """Return what a model weighs in it; prediction heads only where they are loaded."""
        tied = self.head_bits if shape.tied and self.format == "gguf" else self.embedding_bits
        bits = shape.embedding * tied + shape.head * self.head_bits + 16 * (2 * shape.depth + 1) * shape.hidden
        for one in shape.layers:
            each = (one.attention + one.dense) * self.linear_bits + one.router * self.router_bits
            bits += one.count * (each + one.expert * one.experts * self.expert_bits())
        return (bits + drafting * shape.drafting * self.expert_bits()) / 8
