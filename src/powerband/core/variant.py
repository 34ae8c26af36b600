"""A variant: a model in one quantization scheme and file format, with its lineage and digest."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.model import Format


class Calibration(Value):
    """The text that a quantizer was calibrated with."""

    workload: str
    samples: int
    digest: str = Field(description="SHA-256 of the calibration text")
    natural: bool = Field(default=True, description="false if the text is random words, as in a synthetic workload")


class Lineage(Document):
    """How a variant was made; stored in the folder of its weights."""

    kind: ClassVar[str] = "variant"

    model: str
    model_digest: str
    scheme: str
    format: Format
    file: str = Field(description="path of the weights, relative to the folder of this document")
    weights_digest: str = Field(description="SHA-256 of the weights")
    bytes: int
    calibration: Calibration | None = None
    tools: dict[str, str] = Field(default_factory=dict, description="exact versions of the tools")
    seconds: float = Field(description="time that quantization took")
