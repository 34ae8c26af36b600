"""An evaluation: the quality of a served deployment relative to the reference, with intervals and a verdict."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from powerband.core.document import Document, Value, flatten
from powerband.core.quality import Judgement, QualityFloor
from powerband.core.statistics import Interval


class Figure(Value):
    """One fidelity or task figure; with its bound and judgement if the floor bounds it."""

    name: str
    kind: str = Field(default="", description="the class of text; empty: over all classes")
    found: Interval
    samples: int = Field(description="number of texts, answers or questions it is computed from")
    bound: str = ""
    judgement: Judgement | None = None
    samples_to_decide: int | None = None


class Pair(Value):
    """One question with the answers of the reference and of the candidate."""

    kind: str
    question: str
    reference: str
    candidate: str


class Evaluation(Document):
    """The result of `evaluate`."""

    kind: ClassVar[str] = "evaluation"

    reference: str
    candidate: str
    floor: QualityFloor
    figures: tuple[Figure, ...]
    level: float = Field(
        default=0.95,
        description="confidence level of the intervals; above 0.95 because the verdict is checked several times",
    )
    verdict: Judgement
    reason: str
    worst: tuple[Pair, ...] = ()
    stopped_early: bool = False
    engine_s: dict[str, float] = Field(
        default_factory=dict, description="seconds for which each deployment was queried"
    )
    provenance: dict[str, Any] = Field(default_factory=dict)

    def to_records(self) -> list[dict[str, Any]]:
        """Return a flat row for each of the figures."""
        rows = (one.model_dump(mode="json", exclude=None) for one in self.figures)
        return [flatten(row) for row in rows]
