"""Measured quality of quantized models: what others published, and what was evaluated on this machine."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.statistics import Interval
from powerband.core.support import Source

Unit = Literal["recovery", "mean-kl", "same-top", "ppl-ratio"]
Kind = Literal["general", "long-context", "reasoning", "code", "maths", "chat", "text"]
Outlook = Literal["not quantized", "likely", "uncertain", "unlikely", "unknown"]


class QualityRecord(Value):
    """One measurement of a quantized model against the same model without quantization."""

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    parameters: float = Field(gt=0, description="in 1e9")
    experts: bool = Field(default=False, description="a mixture of experts")
    reasoning: bool = Field(default=False, description="a model that reasons before it answers")
    task: Kind = "general"
    benchmark: str = ""
    unit: Unit = "recovery"
    value: float = Field(
        description="recovery: score over that of the unquantized model; mean-kl: nats; same-top: share of positions "
        "with the same most likely token; ppl-ratio: perplexity over that of the unquantized model"
    )
    low: float | None = Field(default=None, description="lowest of the tasks or seeds behind the value")
    high: float | None = Field(default=None, description="highest of them")
    worst: str = Field(default="", description="the task with the lowest value, if it is published")
    note: str = ""
    source: str = Field(default="", description="a key of `sources`; empty: evaluated on this machine")


class Evidence(Document):
    """What was published about one scheme of the weights, or one format of the KV cache."""

    kind: ClassVar[str] = "evidence"

    scheme: str = ""
    kv_format: str = ""
    sources: dict[str, Source]
    records: tuple[QualityRecord, ...]


class ExpectedFigure(Value):
    """One quality figure that evidence lets one expect."""

    unit: Unit
    expected: Interval = Field(description="mean of the evidence, weighted by likeness, with its spread")
    worst: float = Field(description="the worst value seen")
    records: int

    @property
    def text(self) -> str:
        """Return the figure in words, with its spread."""
        one = self.expected
        if self.unit in ("recovery", "same-top"):
            name = "recovery" if self.unit == "recovery" else "same top token"
            return f"{name} {one.value:.1%} [{one.low:.1%}, {one.high:.1%}], worst {self.worst:.1%}"
        name = "KL" if self.unit == "mean-kl" else "perplexity ratio"
        return f"{name} {one.value:.3g} [{one.low:.3g}, {one.high:.3g}], worst {self.worst:.3g}"


class ExpectedQuality(Value):
    """What is known about the quality of an option before it is evaluated: a prior, not a proof."""

    outlook: Outlook = Field(
        description="whether it keeps the floor; uncertain: some of the evidence says so, some does not"
    )
    figures: tuple[ExpectedFigure, ...] = ()
    likeness: str = Field(default="", description="how like the models of the evidence are to this one")
    warnings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
