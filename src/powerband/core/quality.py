"""A quality floor: bounds on fidelity and on task recovery that a deployment must meet."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.statistics import Interval

_BOUND = re.compile(r"^(<=|>=)\s*([0-9.eE+-]+)$")
# Measured only if requests are long, with too few samples to prove anything.
AT_TRAFFIC_LENGTH = ("kl_late", "diverged_depth")
_MAX_SAMPLES = 10**6  # more than this is impractical
FIDELITY = {
    "kl_mean": "mean KL divergence of the next token in nats: a lower bound, over the most likely tokens and the rest",
    "top1_agreement": "share of positions where both have the same most likely next token",
    "perplexity_ratio": "perplexity divided by the reference's, on the same text",
    "diverged": "share of answers that diverge from the reference where the reference clearly prefers its own token",
    "diverged_single": "the same, for single-turn chats",
    "diverged_multi": "the same, for second turns",
    "diverged_long": "the same, for chats with a long context",
    "kl_late": "mean KL divergence near the end of texts as long as the traffic; it can only fail a deployment",
    "diverged_depth": "divergence for questions about a fact in a text as long as the traffic; it can only fail one",
}


class Bound(Value):
    """An upper or lower limit of a figure."""

    at_most: bool
    limit: float

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def judge(self, found: Interval) -> Judgement:
        """Return pass or fail if the whole interval is on one side of the limit, else undecided."""
        inside = found.high <= self.limit if self.at_most else found.low >= self.limit
        outside = found.low > self.limit if self.at_most else found.high < self.limit
        return "pass" if inside else "fail" if outside else "undecided"

    def samples_to_decide(self, found: Interval, samples: int) -> int | None:
        """Estimate the samples needed to decide, if the figure keeps its value; None if no practical number decides."""
        distance = abs(found.value - self.limit)
        margin = (found.high - found.value) if found.value <= self.limit else (found.value - found.low)
        needed = samples * (margin / distance) ** 2 if distance > 1e-12 else math.inf
        return int(needed) + 1 if needed < _MAX_SAMPLES else None


Judgement = Literal["pass", "fail", "undecided"]


def _bound(value: Any) -> Any:
    if isinstance(value, str):
        if not (match := _BOUND.match(value.strip())):
            raise ValueError(f'\'{value}\' is not a bound; write ">= 0.97" or "<= 0.05"')
        return {"at_most": match[1] == "<=", "limit": float(match[2])}
    return value


def _renamed(fidelity: Any) -> Any:
    """Accept the figure names of 0.1: 'spoiled' is 'diverged' now."""
    if not isinstance(fidelity, dict):
        return fidelity
    return {re.sub("^spoiled", "diverged", str(name)): bound for name, bound in fidelity.items()}


BoundText = Annotated[Bound, BeforeValidator(_bound)]


class TaskFloor(Value):
    """The bound of one task."""

    recovery: BoundText = Field(description="score divided by the reference's score on the same samples")


class QualityFloor(Document):
    """The bounds that a deployment must meet to be recommended."""

    kind: ClassVar[str] = "quality"

    fidelity: Annotated[dict[str, BoundText], BeforeValidator(_renamed)] = Field(
        default_factory=dict, description="bounds by figure"
    )
    tasks: dict[str, TaskFloor] = Field(default_factory=dict, description="bounds by task")
    expected_recovery: BoundText | None = Field(
        default=None, description="bound on published recoveries, for `plan` only: an evaluation does not use it"
    )

    @model_validator(mode="after")
    def _check_figures(self) -> QualityFloor:
        unknown = sorted(set(self.fidelity) - set(FIDELITY))
        if unknown:
            raise ValueError(f"unknown fidelity figure '{unknown[0]}'; known: {', '.join(FIDELITY)}")
        if not self.fidelity and not self.tasks:
            raise ValueError("the floor has no bounds; add one under 'fidelity' or 'tasks'")
        return self
