"""Say what is on this machine, which engines it has, and what to do about what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from powerband import engines
from powerband.core.engine import Installation
from powerband.core.host import Host
from powerband.core.units import about_bytes
from powerband.runtime import devices, installations


@dataclass(frozen=True)
class Advice:
    """Something that is missing or in the way, and the command that fixes it."""

    sentence: str
    fix: str


@dataclass(frozen=True)
class Report:
    """What the doctor found."""

    host: Host
    engines: tuple[Installation, ...]
    advice: tuple[Advice, ...]


def examine() -> Report:
    """Look at the machine and at the engines on it."""
    host = devices.this_host()
    found = tuple(
        one for name in engines.names() if engines.get(name).programs for one in installations.found_here(name)
    )
    return Report(host=host, engines=found, advice=tuple(_advise(host, found)))


def _advise(host: Host, found: tuple[Installation, ...]) -> list[Advice]:
    advice = []
    for name in engines.names():
        if engines.get(name).programs and not any(one.engine == name for one in found):
            advice.append(Advice(f"{name} is not installed", f"powerband engine install {name}"))
    if host.gpu_problem:
        advice.append(Advice(host.gpu_problem, "nvidia-smi"))
    if "amx_tile" in host.instruction_sets and not host.amx_usable:
        advice.append(Advice("the CPU lists AMX but the kernel does not let it be used; vLLM does without it", ""))
    if host.available_bytes < 2 * 2**30:
        advice.append(Advice(f"only {about_bytes(host.available_bytes)} of memory is free", "free some memory"))
    return advice
