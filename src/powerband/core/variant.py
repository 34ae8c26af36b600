"""A variant: a model in one scheme and file format, with its lineage and digest."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.model import Format


class Calibration(Value):
    """The text that a quantizer looked at."""

    workload: str
    samples: int
    digest: str = Field(description="SHA-256 of the text")
    natural: bool = Field(default=True, description="False: its words were drawn by lot, as of a made-up workload")


class Lineage(Document):
    """Where a variant comes from, and what it is; it lies beside the weights."""

    kind: ClassVar[str] = "variant"

    model: str
    model_digest: str
    scheme: str
    format: Format
    file: str = Field(description="the weights, in the folder of this document")
    weights_digest: str = Field(description="SHA-256")
    bytes: int
    calibration: Calibration | None = None
    tools: dict[str, str] = Field(default_factory=dict, description="their exact versions")
    seconds: float = Field(description="that making it took")
