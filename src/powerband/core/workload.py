"""A workload: what traffic looks like. Arrivals, lengths, shared prefixes, turns, content."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

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


class Bursts(Value):
    """Groups of requests that arrive at once; the groups are evenly spaced."""

    process: Literal["bursts"]
    rate_per_s: float = Field(gt=0, description="requests, not groups, per second")
    size: int = Field(ge=2)


class Recorded(Value):
    """The trace's own times, as they are or stretched to a mean rate."""

    process: Literal["trace"]
    rate_per_s: float | None = Field(default=None, gt=0)


class Closed(Value):
    """A fixed number of users, each sending the next request when the last is answered."""

    process: Literal["closed"]
    users: int = Field(ge=1)


Arrivals = Annotated[Poisson | Gamma | Constant | Bursts | Recorded | Closed, Field(discriminator="process")]


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
    """A conversation: each turn carries the earlier ones and their answers."""

    count: int = Field(ge=1)
    think_s: Seconds = 0.0


class Adapter(Value):
    """A LoRA adapter that some of the requests ask for."""

    name: str = Field(min_length=1, description="the model name by which the engine serves it")
    share: float = Field(gt=0, le=1)
    request: dict[str, Any] | None = Field(
        default=None,
        description="what a request carries instead of that name; for llama.cpp {lora: [{id: 0, scale: 1.0}]}",
    )


class Dataset(Value):
    """Prompts or chats of a JSONL file, in a seeded order."""

    path: str
    repeat: bool = Field(default=False, description="traffic really repeats these prompts, so caches may know them")


class Trace(Value):
    """Recorded lengths and times of a JSONL (Mooncake) or CSV (Azure) file; the text is made anew."""

    path: str
    first: int | None = Field(default=None, ge=1, description="use only this many requests")
    block_tokens: int = Field(default=512, ge=1, description="tokens that one hash id stands for")


class Workload(Document):
    """Traffic as a value: the same file is the same traffic."""

    kind: ClassVar[str] = "workload"

    arrivals: Arrivals
    prompt: Length | None = Field(default=None, description="tokens of a request's own text, without the prefix")
    output: Length | None = None
    prefix: SharedPrefix | None = None
    turns: Turns | None = None
    adapters: tuple[Adapter, ...] = ()
    dataset: Dataset | None = None
    trace: Trace | None = None
    api: Literal["chat", "completions"] = "chat"
    content: Literal["prose", "code"] = Field(default="prose", description="what synthetic text is made of")
    ending: Literal["exact", "natural"] = Field(default="exact", description="exact: answers have the drawn length")
    temperature: float | None = Field(default=None, ge=0, description="None: the engine's own default")
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if self.dataset and self.trace:
            raise ValueError("give a dataset or a trace, not both")
        if self.trace is None:
            if self.arrivals.process == "trace":
                raise ValueError("arrivals of a trace need a trace")
            if self.output is None:
                raise ValueError("output is missing: how long are the answers?")
            if self.prompt is None and self.dataset is None:
                raise ValueError("prompt is missing: give lengths, a dataset or a trace")
        elif self.prompt or self.output or self.prefix or self.turns:
            raise ValueError("a trace has its own lengths and prefixes; leave prompt, output, prefix and turns away")
        if self.dataset and (self.prompt or self.prefix):
            raise ValueError("a dataset has its own prompts; leave prompt and prefix away")
        if sum(adapter.share for adapter in self.adapters) > 1 + 1e-9:
            raise ValueError("the adapters' shares add up to more than 1")
        return self

    @property
    def rate_per_s(self) -> float | None:
        """Return the mean rate of requests; None for a closed loop and for a trace at its own speed."""
        return getattr(self.arrivals, "rate_per_s", None)

    def at_rate(self, rate_per_s: float) -> Workload:
        """Return the same traffic at another mean rate; a closed loop becomes Poisson."""
        if isinstance(self.arrivals, Closed):
            return self.model_copy(update={"arrivals": Poisson(process="poisson", rate_per_s=rate_per_s)})
        return self.model_copy(update={"arrivals": self.arrivals.model_copy(update={"rate_per_s": rate_per_s})})

    def carrying(self, rate_per_s: float) -> Workload:
        """Return the traffic that proves a promised rate: users who wait for their answers keep their own pace."""
        return self if isinstance(self.arrivals, Closed) else self.at_rate(rate_per_s)

    def with_users(self, users: int) -> Workload:
        """Return the same requests as a closed loop."""
        return self.model_copy(update={"arrivals": Closed(process="closed", users=users)})

    def with_seed(self, seed: int) -> Workload:
        """Return other requests of the same kind."""
        return self.model_copy(update={"seed": seed % 2**32})
