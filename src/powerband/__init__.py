"""Powerband: the cheapest way to serve an open-weight LLM within a latency SLO and a quality floor.

    import powerband as pb

    plan = pb.plan("Qwen/Qwen3-8B", on="h100:8")
    measurement = pb.bench("http://127.0.0.1:8000/v1", workload="chat", rate=2)
    recipe = pb.tune("./model", workload="chat", slo="interactive", budget="30min")

`powerband.aio` has the same functions as coroutines.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from powerband import aio
    from powerband.api import bench, evaluate, plan, tune, verify
    from powerband.core.deployment import Deployment
    from powerband.core.evaluation import Evaluation
    from powerband.core.measurement import Measurement
    from powerband.core.plan import Plan
    from powerband.core.quality import QualityFloor
    from powerband.core.recipe import Recipe
    from powerband.core.slo import SLO
    from powerband.core.study import Study
    from powerband.core.workload import Workload
    from powerband.errors import PowerbandError
    from powerband.launchers.local import launch, prepare
    from powerband.store.documents import parse, read

__all__ = [
    "SLO",
    "Deployment",
    "Evaluation",
    "Measurement",
    "Plan",
    "PowerbandError",
    "QualityFloor",
    "Recipe",
    "Study",
    "Workload",
    "__version__",
    "aio",
    "bench",
    "evaluate",
    "launch",
    "parse",
    "plan",
    "prepare",
    "read",
    "tune",
    "verify",
]

_HOMES = {
    "Deployment": "powerband.core.deployment",
    "Evaluation": "powerband.core.evaluation",
    "Measurement": "powerband.core.measurement",
    "Plan": "powerband.core.plan",
    "PowerbandError": "powerband.errors",
    "QualityFloor": "powerband.core.quality",
    "Recipe": "powerband.core.recipe",
    "SLO": "powerband.core.slo",
    "Study": "powerband.core.study",
    "Workload": "powerband.core.workload",
    "launch": "powerband.launchers.local",
    "parse": "powerband.store.documents",
    "prepare": "powerband.launchers.local",
    "read": "powerband.store.documents",
}
_MODULES = ("aio", "bench", "evaluate", "plan", "tune", "verify")


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts fast."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"powerband.{name}")
    raise AttributeError(f"module 'powerband' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
