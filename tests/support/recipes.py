"""A recipe of each engine, as `tune` writes it."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import Recipe

_ATTAINMENT = {"value": 0.97, "low": 0.95, "high": 0.99}


def recipe(engine: str = "llamacpp", **config: Any) -> Recipe:
    """Return a recipe for a CPU, with these knobs."""
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in config.items())
    slo = {"ttft": {"p95": 0.5}}
    return Recipe.model_validate(
        {
            "name": "smollm2-chat",
            "summary": "it is better",
            "model": "/models/SmolLM2",
            "model_digest": "sha256:0",
            "scheme": "q8_0",
            "weights_digest": "sha256:0",
            "engine_version": {"vllm": "0.32.0", "llamacpp": "9603"}[engine],
            "deployment": {
                "powerband": "deployment/1",
                "name": "smollm2",
                "engine": engine,
                "variant": {"source": "/data/variants/SmolLM2.gguf"},
                "config": config,
            },
            "settings": {},
            "promise": {
                "slo": slo,
                "rate_per_s": 2.5,
                "attainment": _ATTAINMENT,
                "memory_bytes": 2**30,
                "in_flight": 6,
                "prefix_hit_share": 0.5,
            },
            "workload": {
                "arrivals": {"process": "poisson", "rate_per_s": 1},
                "prompt": {"shape": "fixed", "tokens": 8},
                "output": {"shape": "fixed", "tokens": 8},
            },
            "validity": {},
            "usd_per_h": 1.0,
            "usd_per_1m_tokens": 1.0,
            "command": f"/opt/llama-server --model /data/variants/SmolLM2.gguf {options}",
        }
    )
