"""What an engine adapter speaks of: installations, commands, problems, footprints, failures, gauges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from powerband.core.document import Value
from powerband.core.host import Host

FailureKind = Literal[
    "context_too_long",
    "corrupt_file",
    "crashed",
    "died_on_first_request",
    "file_missing",
    "lever_ignored",
    "lora_broken",
    "never_ready",
    "no_answer",
    "out_of_memory",
    "parallelism_refused",
    "port_taken",
    "unknown_flag",
    "unsupported",
    "wrong_format",
    "wrong_value",
]


class Installation(Value):
    """One engine on this machine: how to run it, which version it is, and what it understands."""

    engine: str
    version: str
    origin: Literal["managed", "path", "given", "builtin"]
    program: tuple[str, ...] = Field(min_length=1, description="argv that starts the server, before its options")
    home: str | None = None
    build: str | None = None
    flags: frozenset[str] | None = None
    instruction_sets: frozenset[str] = frozenset()
    tools: dict[str, str] = Field(default_factory=dict)


class Step(Value):
    """One command of an installation; '{home}', '{python}' and '{jobs}' are filled in by the runtime."""

    title: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    makes: str = Field(default="", description="a file that is kept; where it is there, the step is not needed")


class InstallPlan(Value):
    """How to make an environment for one engine version on one host, as commands to run in order."""

    engine: str
    version: str
    build: str = Field(description="what distinguishes the result from another of the same version")
    steps: tuple[Step, ...]
    program: tuple[str, ...]
    tools: dict[str, str] = Field(default_factory=dict)
    instruction_sets: frozenset[str] = Field(default=frozenset(), description="what the CPU must have to run it")


class Installable(Protocol):
    """What can be installed into an environment of its own: an engine, or a tool."""

    @property
    def name(self) -> str: ...
    @property
    def default_version(self) -> str | None: ...
    @property
    def help_args(self) -> tuple[str, ...]: ...

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Return the commands that make it."""


class Command(Value):
    """What to run: an argv and the environment variables to add."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)


class Problem(Value):
    """A reason not to start a deployment, or a warning about it."""

    rule: str
    sentence: str
    hint: str
    severity: Literal["refuse", "warn"] = "refuse"


class Footprint(Value):
    """Bytes that a deployment needs to start, by what they are for; None where the files do not tell."""

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    activations_bytes: int = 0
    overhead_bytes: int = 0
    one_node: bool = Field(default=False, description="all of it must come from one memory node")
    gpu_ways: int = Field(default=0, description="GPUs that share the weights and the KV cache; 0: host memory")
    growth_bytes: int = Field(default=0, description="what may be added later, while it serves")
    lower: tuple[str, ...] = Field(default=(), description="the knobs that make it smaller")

    def start_bytes(self) -> int:
        """Return what must be free before the start."""
        return (self.weights_bytes or 0) + (self.kv_bytes or 0) + self.activations_bytes + self.overhead_bytes


class Scheduling(Value):
    """What a planner must know of an engine before it runs: how it uses memory, and the batches that it makes."""

    memory_share: float = Field(description="of a device's memory that it may take")
    kv_formats: dict[str, float] = Field(description="bytes of one number in the KV cache, by the engine's name for it")
    sequences: int = Field(description="answers written at once that are worth asking for on an accelerator")
    cpu_sequences: int = Field(description="and on a CPU")
    batched_tokens: int = Field(description="tokens of one step on an accelerator")
    cpu_batched_tokens: int
    apart: bool = Field(default=False, description="a step reads prompts and writes answers one after the other")
    cuts_tensors: bool = Field(description="True: devices share every layer; False: each has layers of its own")


class EngineSettings(Value):
    """One way to serve a model, in words that mean the same for every engine."""

    source: str
    scheme: str
    kv_format: str
    tensor: int = 1
    pipeline: int = 1
    data: int = Field(default=1, description="groups of devices with requests of their own, that share the experts")
    expert: bool = False
    drafted: int = Field(default=0, description="tokens that are guessed for each step from what was said before")
    on_cpu: bool = False
    cores: int | None = Field(default=None, description="of the CPU that compute, where not all do")
    sequences: int = Field(description="answers written at once, by each group")
    batched_tokens: int
    context: int = Field(description="tokens of the longest sequence")
    kv_bytes: int = Field(description="of the KV cache, over all devices")


class Lever(Value):
    """Something that can be turned: its settings by name, each a set of knobs; the first is what the engine does."""

    name: str
    settings: dict[str, dict[str, Any]]
    spoils: bool = Field(default=False, description="it may change answers, so the quality gate must look")
    drafts: bool = Field(default=False, description="it guesses tokens, so what it brings depends on what people ask")


class Space(Value):
    """The levers worth searching on a machine, and the knobs that a deployment needs there whatever they are."""

    always: dict[str, Any] = Field(default_factory=dict)
    sooner: dict[str, Any] = Field(
        default_factory=dict, description="what makes a start quick where speed is no matter"
    )
    levers: tuple[Lever, ...]


class Failure(Value):
    """How an engine failed: a kind, one sentence, a hint, and the log line that says so."""

    kind: FailureKind
    sentence: str
    hint: str
    evidence: str = ""


class Gauges(Value):
    """One reading of an engine's own counters, under the same names for every engine; None: it has none."""

    queue_depth: float | None = None
    running: float | None = None
    kv_use: float | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    preemptions: float | None = None
    spec_drafted_tokens: float | None = None
    spec_accepted_tokens: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    refused_requests: float | None = None
    ttft_total_s: float | None = None
    ttft_count: float | None = None


def grown(readings: Sequence[Gauges], name: str) -> float | None:
    """Return by how much a counter grew between the first and the last reading that tells it."""
    values = [value for gauges in readings if (value := getattr(gauges, name)) is not None]
    return values[-1] - values[0] if len(values) > 1 else None
