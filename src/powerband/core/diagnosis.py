"""A diagnosis: what a running server does, what limits it, and what to change."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.statistics import Interval

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
Resource = Literal[
    "idle", "queue", "KV cache", "prefill compute", "decode bandwidth", "compute", "server CPU", "unknown"
]


class Observation(Value):
    """What was read of a server over a window; None: not read, or the engine does not report it.

    Rules name these fields. Rates and means are over the window, not since the server's start.
    """

    engine: str
    engine_version: str | None = None
    model: str | None = None
    window_s: float = 0.0
    readings: int = 0
    settings: dict[str, Any] = Field(default_factory=dict, description="knobs that are known, by the engine's names")
    logged: dict[str, Any] = Field(default_factory=dict, description="facts of the log, by name")

    # traffic
    requests: float | None = Field(default=None, description="requests that ended in the window")
    request_rate_per_s: float | None = None
    rejected: float | None = Field(default=None, description="requests that the engine's queue limit rejected")
    prompt_tokens: float | None = Field(default=None, description="mean prompt tokens of a request")
    output_tokens: float | None = Field(default=None, description="mean output tokens of a request")
    longest_tokens: float | None = Field(default=None, description="longest sequence since the start")
    prompt_tokens_per_s: float | None = Field(default=None, description="computed and cached prompt tokens")
    computed_tokens_per_s: float | None = Field(default=None, description="prompt tokens that were computed")
    output_tokens_per_s: float | None = None
    cached_share: float | None = Field(default=None, description="share of the prompt tokens found in the cache")
    adapters: float | None = Field(default=None, description="LoRA adapters of running and waiting requests")

    # batch, queue, KV cache
    running: float | None = Field(default=None, description="mean number of requests in execution")
    running_max: float | None = None
    waiting: float | None = Field(default=None, description="mean number of waiting requests")
    waiting_max: float | None = None
    waiting_share: float | None = Field(default=None, description="share of the readings with waiting requests")
    deferred_max: float | None = Field(default=None, description="waiting for something else than capacity")
    sequence_limit: float | None = Field(default=None, description="requests that can run at once")
    kv_use: float | None = Field(default=None, description="mean share of the KV cache in use")
    kv_use_max: float | None = None
    kv_tokens: float | None = Field(default=None, description="tokens that the KV cache holds")
    kv_sequences: float | None = Field(default=None, description="sequences of the mean length that it holds")
    context_limit: float | None = Field(default=None, description="longest sequence that the server accepts")
    context_use: float | None = Field(default=None, description="longest sequence as a share of that limit")
    preemptions: float | None = None
    preempted_share: float | None = Field(default=None, description="preemptions for each request that ended")
    step_tokens: float | None = Field(default=None, description="mean tokens of one engine step")

    # latency, from the engine's histograms
    ttft_s: float | None = Field(default=None, description="mean; histograms give means exactly")
    ttft_p50_s: float | None = Field(default=None, description="interpolated within a bucket of the histogram")
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None
    itl_s: float | None = Field(default=None, description="mean time between tokens of a sequence")
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    itl_p99_s: float | None = None
    itl_spread: float | None = Field(default=None, description="p99 over p50 of the time between tokens")
    e2e_s: float | None = None
    queue_s: float | None = Field(default=None, description="mean time in the engine's queue")
    prefill_s: float | None = Field(default=None, description="mean time from the start of a prompt to its first token")
    queue_share: float | None = Field(default=None, description="queue time as a share of the whole latency")
    prefill_ttft_share: float | None = Field(default=None, description="prefill time as a share of the TTFT")
    frontend_share: float | None = Field(default=None, description="TTFT that is neither queue nor prefill")
    prefill_share: float | None = Field(default=None, description="prefill's share of the time in execution")
    slo_ttft_share: float | None = Field(default=None, description="share of the requests within the SLO's TTFT")
    slo_tpot_share: float | None = Field(default=None, description="share of the tokens within the SLO's TPOT")

    # speculation
    draft_tokens: float | None = Field(default=None, description="draft tokens of the window")
    acceptance: float | None = Field(default=None, description="accepted share of the draft tokens")
    tokens_per_step: float | None = Field(
        default=None, description="tokens that a sequence gains in a step with drafts"
    )
    drafted_per_step: float | None = Field(default=None, description="draft tokens of one step of a sequence")

    # the process and its machine, where it is this one
    local: bool = False
    cores_used: float | None = Field(default=None, description="CPU cores that the server uses")
    physical_cores: float | None = Field(default=None, description="cores that the server may use")
    hardware_threads: float | None = Field(default=None, description="hardware threads that the server may use")
    machine_cores: float | None = Field(default=None, description="hardware threads of the machine")
    cpu_quota: float | None = Field(default=None, description="CPU limit of the server's cgroup, in cores")
    throttled_share: float | None = Field(default=None, description="share of the CPU periods that the limit cut short")
    compute_threads: float | None = Field(default=None, description="threads that compute at the same time")
    bound_cores: float | None = Field(default=None, description="cores that the compute threads are bound to")
    busiest_thread: float | None = Field(default=None, description="CPU use of the busiest thread of the API process")
    background_cores: float | None = Field(default=None, description="CPU cores that other processes use")
    swap_bytes: float | None = Field(default=None, description="memory of the server that is swapped out")
    swap_bytes_per_s: float | None = Field(default=None, description="memory that the machine reads from swap")
    major_faults_per_s: float | None = Field(default=None, description="pages that were read from disk")
    numa_nodes: float | None = Field(default=None, description="NUMA nodes that the server's cores belong to")
    log_bytes_per_s: float | None = None

    # accelerators
    gpus: float | None = Field(default=None, description="GPUs that the server uses")
    gpu_name: str | None = None
    compute_capability: float | None = None
    gpu_busy: float | None = Field(default=None, description="share of the time in which a kernel ran")
    throttle_power_share: float | None = Field(default=None, description="share of the busy samples with a power limit")
    throttle_thermal_share: float | None = None
    fits_devices: float | None = Field(default=None, description="fewest GPUs that hold the model and its KV cache")

    # roofline
    memory_share: float | None = Field(default=None, description="bandwidth that decoding uses, of the device's")
    compute_share: float | None = Field(default=None, description="FLOPS that the steps use, of the device's")
    ridge_batch: float | None = Field(default=None, description="batch at which computing takes as long as reading")
    active_weights_bytes: float | None = Field(default=None, description="weights that one step reads")


class Change(Value):
    """What to change: the flags to add or replace, those to remove, and a sentence where flags do not say it."""

    flags: tuple[str, ...] = Field(default=(), description="in the engine's spelling, to add or replace")
    remove: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    text: str = ""
    command: str | None = Field(default=None, description="the whole changed command line, if the present one is known")

    @property
    def short(self) -> str:
        """Return the change on one line."""
        parts = [f"{name}={value}" for name, value in self.environment.items()] + list(self.flags)
        words = " ".join(parts)
        removed = "remove " + " ".join(self.remove) if self.remove else ""
        return "; ".join(part for part in (words, removed, self.text) if part)


class Effect(Value):
    """The expected effect of a change on one metric, as a factor; no factor: unknown."""

    metric: str = Field(description="what changes, such as output tokens/s")
    factor: Interval | None = Field(default=None, description="after over before")
    basis: str = Field(description="where the factor comes from, or why it is unknown")


class Finding(Value):
    """One cause that a rule found."""

    rule: str
    title: str
    severity: Severity
    evidence: str
    why: str
    change: Change
    effect: Effect
    risk: str
    docs: str
    source: str


class Diagnosis(Document):
    """The result of `powerband diagnose`: contains no prompt text and no answers."""

    kind: ClassVar[str] = "diagnosis"

    url: str
    taken_at: str = ""
    preliminary: bool = Field(default=False, description="from the first readings; the window has not ended")
    observation: Observation
    resource: Resource = "unknown"
    resource_evidence: str = ""
    findings: tuple[Finding, ...] = ()
    command: str | None = Field(default=None, description="the server's command line; keys are redacted")
    changed_command: str | None = Field(default=None, description="the command line with all proposed flags")
    prove_command: str | None = Field(default=None, description="the `tune` command that would prove a better one")
    read: tuple[str, ...] = Field(default=(), description="what was read")
    unseen: tuple[str, ...] = Field(default=(), description="what could not be read, and what that hides")

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(one.severity == severity for one in self.findings)

    def to_records(self) -> list[dict[str, Any]]:
        """Return a row for each finding."""
        return [one.model_dump(mode="json") for one in self.findings]
