"""The document `lab.yaml`: simulated hosts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from powerband.core.document import Document, Value
from powerband.core.units import Bytes

Fault = Literal["lost", "memory", "name", "uuid", "capability"]


class DeviceGroup(Value):
    """Equal devices of a host."""

    device: str = Field(description="name in the catalogue; or a name that it does not know, with memory")
    count: int = Field(default=1, ge=0)
    island: int = Field(default=0, ge=0, description="devices connected by fast links; 0: all of them")
    memory: Bytes | None = Field(default=None, description="default: the catalogue's")
    mig: int = Field(default=0, ge=0, description="MIG instances of each; 0: not in MIG mode")
    used: Bytes = Field(default=0, description="memory of each that processes of other people hold")
    faults: dict[int, Fault] = Field(default_factory=dict, description="by position in the group")
    slow: dict[int, float] = Field(default_factory=dict, description="factor on step times, by position in the group")


class HostSpec(Value):
    """One host."""

    name: str
    devices: tuple[DeviceGroup, ...] = ()
    cores: int = Field(default=64, ge=1)
    threads_per_core: int = Field(default=1, ge=1)
    numa_nodes: int = Field(default=1, ge=1)
    memory: Bytes = 512 * 2**30
    available: Bytes | None = None
    loads: Bytes = Field(default=2 * 10**9, description="weights read per second")
    cgroup_memory: Bytes | None = Field(default=None, description="limit of the process's cgroup")
    cgroup_cpus: float | None = Field(default=None, gt=0)
    ignored_options: tuple[str, ...] = Field(default=(), description="that its engines accept and do not apply")
    hidden_metrics: tuple[str, ...] = Field(default=(), description="that its engines do not export")
    driver: str = Field(default="580.82.07", description="'broken': it cannot be reached; empty: none")


class Lab(Document):
    """Hosts of a lab, the seed of what no measurement tells, and the time scale."""

    kind: ClassVar[str] = "lab"

    hosts: tuple[HostSpec, ...] = Field(min_length=1)
    seed: int = 0
    time_scale: float = Field(default=1.0, gt=0, description="durations of engines are multiplied by it")
    start_scale: float | None = Field(default=None, gt=0, description="of their starts; default: time_scale")
