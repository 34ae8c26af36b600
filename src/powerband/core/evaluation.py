"""An evaluation: the quality of a served deployment against the reference, with intervals and a verdict."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.quality import Judgement, QualityFloor
from powerband.core.statistics import Interval


class Figure(Value):
    """One figure of fidelity or of a task, and where a floor bounds it, how that went."""

    name: str
    kind: str = Field(default="", description="the class of text; empty: all of them")
    found: Interval
    samples: int = Field(description="texts, answers or questions behind it")
    bound: str = ""
    judgement: Judgement | None = None
    samples_to_decide: int | None = None


class Pair(Value):
    """One question with both answers."""

    kind: str
    question: str
    reference: str
    candidate: str


class Evaluation(Document):
    """What `evaluate` found."""

    kind: ClassVar[str] = "evaluation"

    reference: str
    candidate: str
    floor: QualityFloor
    figures: tuple[Figure, ...]
    level: float = Field(
        default=0.95, description="of the intervals; above 0.95 because the verdict is looked at often"
    )
    verdict: Judgement
    reason: str
    worst: tuple[Pair, ...] = ()
    stopped_early: bool = False
    engine_s: dict[str, float] = Field(default_factory=dict, description="that each engine was asked for")
    provenance: dict[str, Any] = Field(default_factory=dict)
