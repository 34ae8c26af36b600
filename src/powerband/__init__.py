"""Powerband: the cheapest way to serve a model that keeps your latency promise and your quality floor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from powerband.core.deployment import Deployment
    from powerband.core.measurement import Measurement
    from powerband.core.slo import SLO
    from powerband.core.workload import Workload
    from powerband.errors import PowerbandError
    from powerband.launchers.local import launch, prepare
    from powerband.store.documents import parse, read

__all__ = [
    "SLO",
    "Deployment",
    "Measurement",
    "PowerbandError",
    "Workload",
    "__version__",
    "launch",
    "parse",
    "prepare",
    "read",
]

_HOMES = {
    "Deployment": "powerband.core.deployment",
    "Measurement": "powerband.core.measurement",
    "PowerbandError": "powerband.errors",
    "SLO": "powerband.core.slo",
    "Workload": "powerband.core.workload",
    "launch": "powerband.launchers.local",
    "parse": "powerband.store.documents",
    "prepare": "powerband.launchers.local",
    "read": "powerband.store.documents",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts at once."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'powerband' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
