"""What the proofs of `tune` share: a workload with short answers, a promise, and an order for SmolLM2."""

from __future__ import annotations

from typing import Any

from powerband import tune
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from support import models

WORKLOAD = Workload.model_validate(
    {
        "name": "short-chat",
        "arrivals": {"process": "poisson", "rate_per_s": 4},
        "prompt": {"shape": "lognormal", "median": 60, "p95": 200, "max": 400},
        "output": {"shape": "lognormal", "median": 20, "p95": 50, "max": 80},
        "prefix": {"tokens": 160},
    }
)
PROMISE = SLO.model_validate({"ttft": {"p95": "1s"}, "tpot": {"p95": "80ms"}})


def order(**more: Any) -> tune.Order:
    """Ask for the best way to serve SmolLM2 to such users."""
    source = str(models.make_all().safetensors)
    return tune.Order(source, WORKLOAD, PROMISE, requests=100, engines=("llamacpp",), **more)
