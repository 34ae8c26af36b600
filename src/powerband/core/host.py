"""A host: what one machine has, as read from its own kernel and drivers."""

from __future__ import annotations

from typing import Any

from powerband.core.document import Value


class Gpu(Value):
    """One accelerator as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    uuid: str | None = None
    compute_capability: str | None = None


class NumaNode(Value):
    """One memory node; a process bound to it sees no more than this."""

    index: int
    memory_bytes: int
    available_bytes: int


class Host(Value):
    """The cores, memory, instruction sets and accelerators that a process started here may use."""

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
        """Return what tells this machine from others, for provenance."""
        return {
            "system": self.system,
            "cpu": self.cpu_name,
            "cores": len(self.cores),
            "memory_bytes": self.memory_bytes,
            "gpus": [gpu.name for gpu in self.gpus],
        }
