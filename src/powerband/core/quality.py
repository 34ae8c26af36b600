"""A quality floor: what the answers may not lose, as bounds on fidelity and on task recovery."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.statistics import Interval

_BOUND = re.compile(r"^(<=|>=)\s*([0-9.eE+-]+)$")
_MOST = 10**6  # samples that anybody would ask for
FIDELITY = {
    "kl_mean": "mean KL divergence of the next token, in nats, over the likeliest tokens and the rest: a lower bound",
    "top1_agreement": "share of places where the likeliest next token is the same",
    "perplexity_ratio": "perplexity on the same text, over the reference's",
    "spoiled": "share of answers that leave the reference's way where it saw a clear choice",
    "spoiled_single": "of first answers alone",
    "spoiled_multi": "of second turns",
    "spoiled_long": "of answers behind a long context",
}


class Bound(Value):
    """A value that must stay on one side."""

    at_most: bool
    limit: float

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def judge(self, found: Interval) -> Judgement:
        """Tell which side the whole interval lies on; undecided where it lies on both."""
        inside = found.high <= self.limit if self.at_most else found.low >= self.limit
        outside = found.low > self.limit if self.at_most else found.high < self.limit
        return "pass" if inside else "fail" if outside else "undecided"

    def samples_to_decide(self, found: Interval, samples: int) -> int | None:
        """Return how many samples would decide if the figure stays where it is; None where no number would."""
        distance = abs(found.value - self.limit)
        reach = (found.high - found.value) if found.value <= self.limit else (found.value - found.low)
        wanted = samples * (reach / distance) ** 2 if distance > 1e-12 else math.inf
        return int(wanted) + 1 if wanted < _MOST else None


Judgement = Literal["pass", "fail", "undecided"]


def _bound(value: Any) -> Any:
    if isinstance(value, str):
        if not (match := _BOUND.match(value.strip())):
            raise ValueError(f'\'{value}\' is not a bound; write ">= 0.97" or "<= 0.05"')
        return {"at_most": match[1] == "<=", "limit": float(match[2])}
    return value


Written = Annotated[Bound, BeforeValidator(_bound)]


class TaskFloor(Value):
    """What a task may not lose."""

    recovery: Written = Field(description="score over the reference's score on the same samples")


class QualityFloor(Document):
    """The floor: a deployment below it is never recommended."""

    kind: ClassVar[str] = "quality"

    fidelity: dict[str, Written] = Field(default_factory=dict, description="by figure")
    tasks: dict[str, TaskFloor] = Field(default_factory=dict, description="by task")

    @model_validator(mode="after")
    def _bounds_what_is_known(self) -> QualityFloor:
        unknown = sorted(set(self.fidelity) - set(FIDELITY))
        if unknown:
            raise ValueError(f"there is no fidelity figure '{unknown[0]}'; known: {', '.join(FIDELITY)}")
        if not self.fidelity and not self.tasks:
            raise ValueError("it asks for nothing; bound a figure of fidelity or a task")
        return self
