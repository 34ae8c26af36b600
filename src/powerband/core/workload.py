"""A workload: what traffic looks like. Arrivals, lengths, shared prefixes, turns, content."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.units import Seconds

Tokens = Annotated[int, Field(ge=1)]


class Poisson(Value):
    """Independent arrivals at a mean rate."""

    process: Literal["poisson"]
    rate_per_s: float = Field(gt=0)


class Gamma(Value):
    """Arrivals at a mean rate whose gaps have a given coefficient of variation: above 1 is bursty."""

    process: Literal["gamma"]
    rate_per_s: float = Field(gt=0)
    variation: float = Field(gt=0)


class Constant(Value):
    """Evenly spaced arrivals."""

    process: Literal["constant"]
    rate_per_s: float = Field(gt=0)


class Closed(Value):
    """A fixed number of users, each sending the next request when the last is answered."""

    process: Literal["closed"]
    users: int = Field(ge=1)


Arrivals = Annotated[Poisson | Gamma | Constant | Closed, Field(discriminator="process")]


class Fixed(Value):
    """Always the same length."""

    shape: Literal["fixed"]
    tokens: Tokens


class Uniform(Value):
    """Any length between two, equally likely."""

    shape: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class LogNormal(Value):
    """Long-tailed lengths, given by their median and 95th percentile."""

    shape: Literal["lognormal"]
    median: Tokens
    p95: Tokens
    max: Tokens | None = None

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if self.median > self.p95 or (self.max is not None and self.p95 > self.max):
            raise ValueError("expected median <= p95 <= max")
        return self


Length = Annotated[Fixed | Uniform | LogNormal, Field(discriminator="shape")]


class SharedPrefix(Value):
    """Text that many requests begin with: system prompts, tools, documents."""

    tokens: Tokens
    distinct: int = Field(default=1, ge=1, description="how many different prefixes there are")
    share: float = Field(default=1.0, gt=0, le=1, description="part of the requests that begin with one")


class Turns(Value):
    """A conversation: each turn carries the earlier ones."""

    count: int = Field(ge=1)
    think_s: Seconds = 0.0


class Workload(Document):
    """Traffic as a value: the same file is the same traffic."""

    kind: ClassVar[str] = "workload"

    arrivals: Arrivals
    prompt: Length
    output: Length
    prefix: SharedPrefix | None = None
    turns: Turns | None = None
    seed: int = Field(default=0, ge=0)
