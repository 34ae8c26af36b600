"""The bundle of a self-test: what a machine is, and what each check found, without names of its owner.

Texts are fixed words, labels of drivers and versions, and names and sources of coefficients. Before they are written,
`selftest/bundle.py` searches all of them for paths and secrets, and the labels for host and user names.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from powerband.core.coefficients import Coefficients
from powerband.core.document import Document, Value
from powerband.core.engine import FailureKind

State = Literal["passed", "failed", "not possible", "not run"]
CheckName = Literal[
    "detection", "free memory", "placement", "start", "memory", "plan", "gauges", "kill", "levers", "replicas", "export"
]  # fmt: skip
Reason = Literal[
    "cannot start",
    "counter not increasing",
    "device unknown",
    "driver unreachable",
    "engine exited",
    "death not noticed",
    "fact unknown",
    "gauge missing",
    "GPU not answering",
    "internal error",
    "KV cache differs",
    "lever ignored",
    "memory above prediction",
    "memory in use",
    "memory not freed",
    "no GPU",
    "no engine start",
    "no free devices",
    "no shape",
    "out of time",
    "prediction error",
    "replicas unequal",
    "requests failed",
    "selection differs",
    "setting fails",
    "target fails",
    "too few devices",
    "units shared",
    "wrong cores",
]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=40)]
FigureName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.+= -]*$", max_length=60)]
Label = Annotated[str, StringConstraints(pattern=r"^[^\\\n]*$", max_length=100)]  # of a driver or a version


class CheckResult(Value):
    """The result of one check."""

    check: CheckName
    engine: Word | None = Field(default=None, description="None: a check of the machine")
    state: State
    reason: Reason | None = Field(default=None, description="why it failed or did not run")
    failure: FailureKind | None = Field(default=None, description="how the engine failed")
    figures: dict[FigureName, int | float | Word] = Field(
        default_factory=dict, description="base units: s, bytes, tokens"
    )
    took_s: float = 0.0


class GpuFacts(Value):
    """One GPU, as its driver reports it."""

    name: Label
    memory_bytes: int
    driver: Label
    compute_capability: Label | None = None
    island: int | None = None
    unknown: tuple[Label, ...] = ()


class MachineFacts(Value):
    """The hardware."""

    system: Word
    machine: Word
    cpu: Label
    cores: int
    numa_nodes: int
    memory_bytes: int
    device: Word | None = Field(default=None, description="name in the catalogue; None: not in it")
    gpus: tuple[GpuFacts, ...] = ()


class EngineFacts(Value):
    """An engine, and the shape of the model that it served; the model's name is not recorded."""

    engine: Word
    version: Label
    build: Label | None = None
    architecture: Word | None = None
    layers: int | None = None
    hidden: int | None = None
    weight_bytes: int | None = None
    scheme: Word | None = None


class ProbeRow(Value):
    """The median latencies of a burst of equal requests."""

    engine: Word
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    step_s: float = Field(description="mean duration of a decode step of the whole burst")


class Selftest(Document):
    """The result of `powerband selftest`."""

    kind: ClassVar[str] = "selftest"

    version: Label = Field(description="of Powerband")
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d$")]
    rehearsed: bool = Field(default=False, description="on a simulated host: says nothing about real devices")
    machine: MachineFacts
    engines: tuple[EngineFacts, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    probes: tuple[ProbeRow, ...] = ()
    calibrations: tuple[Coefficients, ...] = Field(default=(), description="fitted to the probes, for the planner")

    def count(self, state: State) -> int:
        """Return how many checks ended in a state."""
        return sum(one.state == state for one in self.checks)
