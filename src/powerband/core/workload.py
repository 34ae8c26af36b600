"""A workload: a description of traffic by its arrivals, lengths, shared prefixes, turns and content."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.units import Seconds

Tokens = Annotated[int, Field(ge=1)]


class Poisson(Value):
    """Poisson arrivals at a mean rate."""

    process: Literal["poisson"]
    rate_per_s: float = Field(gt=0)


class Gamma(Value):
    """Arrivals at a mean rate with gamma-distributed gaps; a coefficient of variation above 1 is bursty."""

    process: Literal["gamma"]
    rate_per_s: float = Field(gt=0)
    variation: float = Field(gt=0, description="coefficient of variation of the gaps")


class Constant(Value):
    """Evenly spaced arrivals."""

    process: Literal["constant"]
    rate_per_s: float = Field(gt=0)


class Bursts(Value):
    """Evenly spaced groups of requests that arrive at the same moment."""

    process: Literal["bursts"]
    rate_per_s: float = Field(gt=0, description="requests, not groups, per second")
    size: int = Field(ge=2, description="requests in a group")


class Recorded(Value):
    """The recorded times of the trace, unchanged or scaled to a mean rate."""

    process: Literal["trace"]
    rate_per_s: float | None = Field(default=None, gt=0)


class Closed(Value):
    """A closed loop: a fixed number of users, each of whom sends a request when the previous one is answered."""

    process: Literal["closed"]
    users: int = Field(ge=1)


Arrivals = Annotated[Poisson | Gamma | Constant | Bursts | Recorded | Closed, Field(discriminator="process")]


class Fixed(Value):
    """A constant length."""

    shape: Literal["fixed"]
    tokens: Tokens


class Uniform(Value):
    """A uniformly distributed length between two bounds."""

    shape: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class LogNormal(Value):
    """A log-normally distributed length, given by its median and 95th percentile."""

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
    """A prefix shared by many requests: a system prompt, tool descriptions, a document."""

    tokens: Tokens
    distinct: int = Field(default=1, ge=1, description="number of different prefixes")
    share: float = Field(default=1.0, gt=0, le=1, description="share of requests that start with a shared prefix")


class Turns(Value):
    """A multi-turn session: each turn contains the earlier turns and their answers."""

    count: int = Field(ge=1, description="turns in a session")
    think_s: Seconds = Field(default=0.0, description="pause between an answer and the next turn")


class Adapter(Value):
    """A LoRA adapter that a share of the requests uses."""

    name: str = Field(min_length=1, description="the model name under which the engine serves it")
    share: float = Field(gt=0, le=1)
    rank: int = Field(default=16, ge=1, le=512, description="LoRA rank; `plan` counts its memory")
    request: dict[str, Any] | None = Field(
        default=None,
        description="request fields that select it instead of the name; llama.cpp: {lora: [{id: 0, scale: 1.0}]}",
    )


class Dataset(Value):
    """Prompts or chats from a JSONL file, in an order that depends on the seed."""

    path: str
    repeat: bool = Field(default=False, description="prompts may repeat, as in the real traffic; prefix caches may hit")


class Trace(Value):
    """Recorded lengths and times from a JSONL (Mooncake) or CSV (Azure) file; the text is synthetic."""

    path: str
    first: int | None = Field(default=None, ge=1, description="use only the first N requests")
    block_tokens: int = Field(default=512, ge=1, description="tokens per hash id")


class Workload(Document):
    """A reproducible description of traffic: the same file and seed give the same requests."""

    kind: ClassVar[str] = "workload"

    arrivals: Arrivals
    prompt: Length | None = Field(default=None, description="tokens of a request's own text, without the shared prefix")
    output: Length | None = None
    prefix: SharedPrefix | None = None
    turns: Turns | None = None
    adapters: tuple[Adapter, ...] = ()
    dataset: Dataset | None = None
    trace: Trace | None = None
    api: Literal["chat", "completions"] = "chat"
    content: Literal["prose", "code"] = Field(default="prose", description="kind of synthetic text")
    ending: Literal["exact", "natural"] = Field(
        default="exact", description="exact: answers have the sampled length; natural: they may end earlier"
    )
    temperature: float | None = Field(default=None, ge=0, description="None: the engine's default")
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _check_sources(self) -> Workload:
        if self.dataset and self.trace:
            raise ValueError("give a dataset or a trace, not both")
        if self.trace is None:
            if self.arrivals.process == "trace":
                raise ValueError("'arrivals: {process: trace}' needs a trace")
            if self.output is None:
                raise ValueError("output is missing: give the distribution of answer lengths")
            if self.prompt is None and self.dataset is None:
                raise ValueError("prompt is missing: give a distribution of prompt lengths, a dataset or a trace")
        elif self.prompt or self.output or self.prefix or self.turns:
            raise ValueError("a trace contains lengths and prefixes: remove prompt, output, prefix and turns")
        if self.dataset and (self.prompt or self.prefix):
            raise ValueError("a dataset contains the prompts: remove prompt and prefix")
        if (total := sum(adapter.share for adapter in self.adapters)) > 1 + 1e-9:
            raise ValueError(f"the shares of the adapters sum to {total:g}, more than 1")
        return self

    @property
    def rate_per_s(self) -> float | None:
        """Return the mean request rate; None for a closed loop and for a trace at its recorded speed."""
        return getattr(self.arrivals, "rate_per_s", None)

    def at_rate(self, rate_per_s: float) -> Workload:
        """Return the workload at another mean rate; a closed loop becomes Poisson."""
        if isinstance(self.arrivals, Closed):
            return self.model_copy(update={"arrivals": Poisson(process="poisson", rate_per_s=rate_per_s)})
        return self.model_copy(update={"arrivals": self.arrivals.model_copy(update={"rate_per_s": rate_per_s})})

    def at_rate_if_open(self, rate_per_s: float) -> Workload:
        """Return the workload at this rate, or unchanged if it is a closed loop, whose users set the rate."""
        return self if isinstance(self.arrivals, Closed) else self.at_rate(rate_per_s)

    def with_users(self, users: int) -> Workload:
        """Return the workload as a closed loop with this many users."""
        return self.model_copy(update={"arrivals": Closed(process="closed", users=users)})

    def with_seed(self, seed: int) -> Workload:
        """Return the workload with another seed: different requests from the same distributions."""
        return self.model_copy(update={"seed": seed % 2**32})
