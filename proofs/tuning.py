"""Shared by the proofs of `tune`: a workload with short answers, an SLO, and a spec for SmolLM2."""

from __future__ import annotations

from typing import Any

from powerband import tune
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from support import models

WORKLOAD = Workload.model_validate(
    {
        "name": "short-chat",
        "arrivals": {"process": "poisson", "rate_per_s": 8},
        "prompt": {"shape": "lognormal", "median": 24, "p95": 70, "max": 100},
        "output": {"shape": "lognormal", "median": 5, "p95": 12, "max": 16},
    }
)
TUNE_SLO = SLO.model_validate({"ttft": {"p90": "400ms"}, "tpot": {"p90": "80ms"}})
REQUESTS = 65  # at each load


def tune_spec(**more: Any) -> tune.TuneSpec:
    """Return the spec that tunes llama.cpp with SmolLM2 for this workload."""
    source = str(models.make_all().safetensors)
    return tune.TuneSpec(source, WORKLOAD, TUNE_SLO, requests=REQUESTS, engines=("llamacpp",), **more)
