"""A host: the hardware of one machine, as its kernel and drivers report it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from powerband.core.document import Value


class Gpu(Value):
    """One GPU, as its driver reports it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    uuid: str | None = None
    compute_capability: str | None = None
    vendor: Literal["nvidia", "amd", "apple"] = "nvidia"
    numa_node: int | None = None
    island: int | None = Field(default=None, description="GPUs of one island have fast links; None: unknown")
    shares_memory: bool = Field(default=False, description="its memory is the host's memory")
    unknown: tuple[str, ...] = Field(default=(), description="facts that the driver did not answer")

    @property
    def id(self) -> str:
        """Return the UUID, or the index if the driver does not answer it."""
        return self.uuid or str(self.index)


class NumaNode(Value):
    """The memory and cores of one NUMA node."""

    index: int
    cores: tuple[int, ...] = ()
    memory_bytes: int
    available_bytes: int


class Host(Value):
    """The cores, memory, instruction sets and GPUs that a process on this machine can use."""

    system: str
    machine: str
    cpu_name: str
    cores: tuple[int, ...]
    core_threads: tuple[tuple[int, ...], ...] = Field(default=(), description="usable hardware threads of each core")
    numa_nodes: tuple[NumaNode, ...] = ()
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None = None
    cpu_quota: float | None = None
    instruction_sets: frozenset[str] = frozenset()
    amx_usable: bool = False
    compiler: str | None = None
    nvcc: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str | None = None

    def described(self) -> dict[str, Any]:
        """Return a summary of the machine, for provenance."""
        return {
            "system": self.system,
            "cpu": self.cpu_name,
            "cores": len(self.cores),
            "memory_bytes": self.memory_bytes,
            "gpus": [gpu.name for gpu in self.gpus],
        }
