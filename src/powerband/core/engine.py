"""Values that engine adapters take and return: installations, commands, problems, levers, failures, gauges."""

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
    """An engine or tool on this machine: its program, version, build and flags."""

    engine: str
    version: str
    origin: Literal["managed", "path", "given", "builtin"] = Field(description="managed: installed by Powerband")
    program: tuple[str, ...] = Field(min_length=1, description="argv that starts the server, before its options")
    home: str | None = Field(default=None, description="directory of a managed installation")
    build: str | None = Field(default=None, description="build variant, such as cuda or avx2+fma")
    flags: frozenset[str] | None = Field(default=None, description="flags in its --help; None: unknown")
    instruction_sets: frozenset[str] = Field(default=frozenset(), description="instruction sets that it requires")
    tools: dict[str, str] = Field(default_factory=dict, description="paths of further programs, by name")


class Step(Value):
    """One command of an installation or a quantization; an installation replaces {home}, {python} and {jobs}."""

    title: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    makes: str = Field(default="", description="an output file that is kept; if it exists, the step is skipped")


class StepProgress(Value):
    """Progress of a step; reported when the step starts, and about once a second while it runs."""

    title: str
    number: int = Field(ge=0, description="0: what the installation will take, before its first step")
    total: int
    elapsed_s: float = Field(default=0.0, description="since the step started; 0: it starts now")
    fraction: float | None = Field(default=None, description="completed part, from the build tool's output")

    @property
    def starts(self) -> bool:
        """Return whether this is the first report of the step."""
        return self.elapsed_s == 0

    @property
    def remaining_s(self) -> float | None:
        """Estimate the remaining time, assuming a constant speed; None without a fraction."""
        return self.elapsed_s * (1 - self.fraction) / self.fraction if self.fraction else None


class Archive(Value):
    """A published archive of an engine's programs."""

    version: str
    machine: str = Field(default="", description="of the hosts that it runs on, as `uname -m` says")
    system: str = "Linux"
    source: str = Field(description="URL or file")
    sha256: str = Field(pattern="^[0-9a-fA-F]{64}$")
    size_bytes: int | None = None
    unpacked_bytes: int | None = None


class InstallPlan(Value):
    """The commands that install one version of an engine on one host, in order."""

    engine: str
    version: str
    build: str = Field(description="distinguishes builds of the same version")
    steps: tuple[Step, ...]
    program: tuple[str, ...]
    tools: dict[str, str] = Field(default_factory=dict)
    instruction_sets: frozenset[str] = Field(
        default=frozenset(), description="instruction sets that the result requires"
    )
    expects: str = Field(default="", description="how long it takes and what it downloads, for people")


class Installable(Protocol):
    """An engine or tool that can be installed into a separate environment."""

    @property
    def name(self) -> str: ...
    @property
    def default_version(self) -> str | None: ...
    @property
    def help_args(self) -> tuple[str, ...]: ...

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Return the commands that install a version on a host."""


class Command(Value):
    """An argv, and the environment variables to add."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)


class Problem(Value):
    """A reason not to start a deployment, or a warning about it."""

    rule: str
    sentence: str
    hint: str
    severity: Literal["refuse", "warn"] = "refuse"


class Footprint(Value):
    """Memory that a deployment needs to start, by use; None: unknown."""

    weights_bytes: int | None = None
    kv_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    activations_bytes: int = 0
    overhead_bytes: int = 0
    one_node: bool = Field(default=False, description="all of it must come from one NUMA node")
    gpu_ways: int = Field(default=0, description="GPUs that share the weights and the KV cache; 0: host memory")
    copies: int = Field(default=1, description="data-parallel copies, each on its own GPUs")
    over_nodes: bool = Field(default=False, description="the engine's own Ray executor places it on several machines")
    gpu_free_bytes: int = Field(default=0, description="memory that must be free on each GPU at the start")
    gpu_free_share: float = Field(default=0.0, description="share of each GPU's memory that it takes at the start")
    growth_bytes: int = Field(default=0, description="memory that it may allocate later, while serving")
    lower: tuple[str, ...] = Field(default=(), description="the knobs that reduce it")

    @property
    def devices(self) -> int:
        """Return the number of GPUs of this machine that the deployment occupies."""
        return 0 if self.over_nodes else self.gpu_ways * self.copies

    def start_bytes(self) -> int:
        """Return the memory that must be free at startup."""
        return (self.weights_bytes or 0) + (self.kv_bytes or 0) + self.activations_bytes + self.overhead_bytes


class Scheduling(Value):
    """How an engine uses memory and forms batches, for the planner."""

    memory_share: float = Field(description="share of a device's memory that the engine uses")
    kv_formats: dict[str, float] = Field(description="bytes per KV cache element, by the engine's dtype name")
    sequences: int = Field(description="maximum batch size to plan with on an accelerator")
    cpu_sequences: int = Field(description="maximum batch size to plan with on a CPU")
    batched_tokens: int = Field(description="tokens per step on an accelerator")
    cpu_batched_tokens: int = Field(description="tokens per step on a CPU")
    separate_prefill_decode: bool = Field(
        default=False, description="prefill and decode of a step run one after the other"
    )
    tensor_parallel: bool = Field(description="devices split every layer; False: each device has whole layers")


class EngineSettings(Value):
    """Settings of a deployment that mean the same for every engine."""

    source: str
    scheme: str
    kv_format: str
    tensor: int = 1
    pipeline: int = 1
    data: int = Field(default=1, description="data-parallel groups, which share the experts")
    expert: bool = False
    adapters: int = Field(default=0, description="LoRA adapters that one batch may use")
    adapter_rank: int = Field(default=0, description="the largest rank of a LoRA adapter")
    drafted: int = Field(default=0, description="draft tokens per step, from n-gram speculation")
    on_cpu: bool = False
    emulates_16_bit: bool = Field(default=False, description="the CPU converts 16-bit floats before every operation")
    cores: int | None = Field(default=None, description="CPU cores that compute; None: all")
    sequences: int = Field(description="maximum batch size of each data-parallel group")
    batched_tokens: int = Field(description="tokens per step")
    context: int = Field(description="maximum sequence length, in tokens")
    kv_bytes: int = Field(description="KV cache size, over all devices")


class Lever(Value):
    """A choice to search: settings by name, each a set of knobs; the first is the engine's default."""

    name: str
    settings: dict[str, dict[str, Any]]
    affects_quality: bool = Field(default=False, description="it can change answers, so the quality gate applies")
    drafts: bool = Field(default=False, description="it is speculative decoding, whose gain depends on the traffic")


class Space(Value):
    """The levers to search on a host, and knobs that every deployment on it has."""

    always: dict[str, Any] = Field(default_factory=dict, description="knobs of every deployment")
    fast_start: dict[str, Any] = Field(
        default_factory=dict, description="knobs that shorten the start, for runs that measure no speed"
    )
    levers: tuple[Lever, ...]


class Failure(Value):
    """How an engine failed: a kind, one sentence, a hint, and the log line that shows it."""

    kind: FailureKind
    sentence: str
    hint: str
    evidence: str = ""


class Gauges(Value):
    """One reading of an engine's metrics, by the same names for every engine; None: the engine has no such metric.

    `powerband.metrics.GAUGES` describes each of them.
    """

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


_SHARES = ("kv_use",)


def combined(readings: Sequence[Gauges]) -> Gauges:
    """Return one reading of several engines: sums, and the largest share in use."""
    found = {}
    for name in Gauges.model_fields:
        values = [value for one in readings if (value := getattr(one, name)) is not None]
        if values:
            found[name] = max(values) if name in _SHARES else sum(values)
    return Gauges(**found)


def counter_increase(readings: Sequence[Gauges], name: str) -> float | None:
    """Return the increase of a counter between the first and the last reading that has it."""
    values = [value for gauges in readings if (value := getattr(gauges, name)) is not None]
    return values[-1] - values[0] if len(values) > 1 else None
