"""Device families: devices for which an engine's documentation says the same about weights and KV caches."""

from __future__ import annotations

from typing import Literal

from powerband.core.host import Gpu, Host

Family = Literal[
    "volta", "turing", "ampere", "ada", "hopper", "sm100", "sm120",
    "mi300", "mi350", "rdna",
    "apple",
    "x86", "x86-bf16", "x86-amx", "arm",
]  # fmt: skip
LABELS: dict[Family, str] = {
    "volta": "NVIDIA Volta",
    "turing": "NVIDIA Turing",
    "ampere": "NVIDIA Ampere",
    "ada": "NVIDIA Ada",
    "hopper": "NVIDIA Hopper",
    "sm100": "NVIDIA Blackwell for servers (SM100)",
    "sm120": "NVIDIA Blackwell for workstations (SM120)",
    "mi300": "AMD MI300",
    "mi350": "AMD MI350",
    "rdna": "AMD RDNA",
    "apple": "Apple silicon",
    "x86": "x86 CPUs without bf16",
    "x86-bf16": "x86 CPUs with bf16",
    "x86-amx": "x86 CPUs with AMX",
    "arm": "ARM CPUs",
}
_BY_CAPABILITY: tuple[tuple[float, Family], ...] = (
    (12.0, "sm120"), (10.0, "sm100"), (9.0, "hopper"), (8.9, "ada"), (8.0, "ampere"), (7.5, "turing"), (7.0, "volta"),
)  # fmt: skip
_MI350, _MI300 = ("MI350", "MI355"), ("MI300", "MI325")


def of_compute_capability(text: str) -> Family | None:
    """Return the family of an NVIDIA GPU; None if it is older than Volta."""
    return next((family for least, family in _BY_CAPABILITY if float(text) >= least), None)


def of_gpu(gpu: Gpu) -> Family | None:
    """Return the family of a GPU; None: unknown."""
    if gpu.vendor == "apple":
        return "apple"
    if gpu.vendor == "nvidia":
        return of_compute_capability(gpu.compute_capability) if gpu.compute_capability else None
    if any(name in gpu.name for name in _MI350):
        return "mi350"
    if any(name in gpu.name for name in _MI300):
        return "mi300"
    return "rdna" if "Instinct" not in gpu.name else None


def of_cpu(host: Host) -> Family:
    """Return the family of a host's CPU."""
    if host.machine.lower() in ("aarch64", "arm64"):
        return "arm"
    if "amx_bf16" in host.instruction_sets and host.amx_usable:
        return "x86-amx"
    return "x86-bf16" if "avx512_bf16" in host.instruction_sets else "x86"


def families_of(host: Host) -> set[Family | None]:
    """Return the families that an engine would compute on: those of the GPUs, or that of the CPU."""
    return {of_gpu(gpu) for gpu in host.gpus} or {of_cpu(host)}
