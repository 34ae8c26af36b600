"""A host: the hardware of one machine, as its kernel and drivers report it."""

from __future__ import annotations

from typing import Any

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


class NumaNode(Value):
    """The memory of one NUMA node."""

    index: int
    memory_bytes: int
    available_bytes: int


class Host(Value):
    """The cores, memory, instruction sets and GPUs that a process on this machine can use."""

    system: str
    machine: str
    cpu_name: str
    cores: tuple[int, ...]
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
