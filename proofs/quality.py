"""Shared by the proofs of the quality gate: SmolLM2's variants, and a client of a running engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prelude import powerband, say

from powerband import inputs, quantize
from powerband.evaluate.engine_client import EngineClient
from powerband.launchers import local
from support import models

KNOBS: dict[str, dict[str, Any]] = {
    "llamacpp": {"parallel": 4, "ctx_size": 8192, "cache_ram": 0},
    "vllm": {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": "512MiB",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": 0,
    },
}
EAGER: dict[str, dict[str, Any]] = KNOBS | {"vllm": KNOBS["vllm"] | {"enforce_eager": True}}  # starts faster
GGUF = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m", "q2_k")


def made(*schemes: str, source: Path | None = None) -> dict[str, quantize.QuantizedVariant]:
    """Create variants of SmolLM2, or return cached ones."""
    whole = source or models.make_all().safetensors
    return {
        scheme: asyncio.run(
            quantize.quantize(
                quantize.QuantizeSpec(str(whole), scheme),
                progress=lambda step, scheme=scheme: print(f"{scheme}: {step.title}") if step.starts else None,
            )
        )
        for scheme in schemes
    }


def variants(*schemes: str) -> dict[str, Path]:
    """Return the paths of the variants."""
    return {scheme: one.path for scheme, one in made(*schemes).items()}


@contextlib.asynccontextmanager
async def engine_client(source: str, *settings: str) -> AsyncIterator[EngineClient]:
    """Launch a deployment and return a client of it."""
    prepared = local.prepare(inputs.deployment(source, engine=None, settings=list(settings), host=None, port=None))
    async with (
        local.launch(prepared) as replica,
        EngineClient(replica, await replica.model_name(), concurrency=2) as client,
    ):
        yield client


def deployment(folder: Path, name: str, source: Path | str, engine: str, knobs: dict[str, Any]) -> Path:
    """Write a deployment file."""
    file = folder / f"{name}.yaml"
    lines = [f"powerband: deployment/1\nname: {name}\nengine: {engine}\nvariant: {{source: {source}}}\nconfig:"]
    file.write_text("\n".join([*lines, *(f"  {knob}: {json.dumps(value)}" for knob, value in knobs.items())]) + "\n")
    return file


def judged(candidate: Path, reference: Path, folder: Path, *args: str) -> dict[str, Any]:
    """Run `evaluate`, and return the evaluation."""
    output = folder / f"judged-{candidate.stem}"
    done, _ = powerband(
        "evaluate", str(candidate), "--reference", str(reference), "--output", str(output), *args, timeout=1800
    )
    file = output / "evaluation.json"
    if not file.exists():
        say(f"{candidate.stem}: no verdict (exit {done.returncode}): {done.stderr.strip()[-300:]}")
        return {"verdict": "none", "figures": [], "engine_s": {}, "reason": ""}
    return dict(json.loads(file.read_text())) | {"exit": done.returncode}


def figure(found: dict[str, Any], name: str) -> dict[str, float]:
    """Return one figure of all texts: its value and interval."""
    return next((dict(one["found"]) for one in found["figures"] if one["name"] == name and not one.get("kind")), {})


def ranged(one: dict[str, float], digits: int = 3) -> str:
    """Write a figure with its interval."""
    return f"{one['value']:.{digits}f} [{one['low']:.{digits}f}, {one['high']:.{digits}f}]" if one else "none"


def schemes_in(args: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the schemes among the arguments, or all of them."""
    return [one for one in args if one in every] or list(every)
