"""Inspect this machine: hardware, installed engines, and advice on what is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from powerband import engines
from powerband.core.engine import Installation
from powerband.core.host import Host
from powerband.core.units import about_bytes
from powerband.runtime import devices, installations, leases


@dataclass(frozen=True)
class Advice:
    """A problem, and the command that fixes it."""

    sentence: str
    fix: str


@dataclass(frozen=True)
class Report:
    """The result of `examine`."""

    host: Host
    engines: tuple[Installation, ...]
    advice: tuple[Advice, ...]
    held: dict[str, str] = field(default_factory=dict)  # by GPU: the process and the deployment that hold it


def examine() -> Report:
    """Inspect the hardware and find the installed engines."""
    host = devices.this_host()
    found = tuple(one for name in engines.names() if engines.get(name).programs for one in installations.discover(name))
    held = {unit: holder for unit, holder in leases.held(host).items() if not unit.startswith("core-")}
    return Report(host=host, engines=found, advice=tuple(_advise(host, found)), held=held)


def _advise(host: Host, found: tuple[Installation, ...]) -> list[Advice]:
    advice = []
    for name in engines.names():
        if engines.get(name).default_version and not any(one.engine == name for one in found):
            advice.append(Advice(f"{name} is not installed", f"powerband engine install {name}"))
    if host.gpu_problem:
        advice.append(Advice(host.gpu_problem, "nvidia-smi"))
    if "amx_tile" in host.instruction_sets and not host.amx_usable:
        advice.append(Advice("the CPU has AMX, but the kernel does not permit its use; vLLM runs without AMX", ""))
    if host.available_bytes < 2 * 2**30:
        advice.append(Advice(f"only {about_bytes(host.available_bytes)} of memory is free", "free some memory"))
    return advice
