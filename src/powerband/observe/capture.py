"""What a fleet noted, as a workload: lengths, times, which beginnings were shared; and a sample of prompts if asked."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from powerband.core.prefix_hash import FINE
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.observe import Note

_SAMPLE = 1000  # prompts


def capture(held: Sequence[Note], folder: Path, *, name: str) -> Path:
    """Write what a fleet noted as a workload for `bench` and `tune`: lengths, times, which beginnings were shared."""
    if not held:
        raise InputError("the fleet has answered nothing yet", hint="wait for traffic")
    trace = folder / f"{name}-trace.jsonl"
    per_character = _tokens_per_character(held)
    kept = ("timestamp", "output_length", "hash_ids", "characters", "turns")  # the last two are for `observe`
    lines = [
        {"input_length": max(1, round(per_character * row["characters"])), **{key: row[key] for key in kept}}
        for row in held
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in lines))
    workload = Workload.model_validate(
        {
            "name": name,
            "description": f"captured: {len(held)} requests",
            "arrivals": {"process": "trace"},
            "trace": {"path": trace.name, "block_tokens": max(1, round(FINE * per_character))},
        }
    )
    _sample(held, folder / f"{name}-prompts.jsonl")
    path = folder / f"{name}.yaml"
    path.write_text(workload.to_text())
    return path


def _sample(held: Sequence[Note], path: Path) -> None:
    """Write what was asked, where the fleet was told to note it: a dataset for `bench`, `evaluate` and `quantize`."""
    spoken = [row["messages"] for row in held if row.get("messages")]
    if spoken:
        step = max(1, len(spoken) // _SAMPLE)
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in spoken[::step][:_SAMPLE]))


def _tokens_per_character(held: Sequence[Note]) -> float:
    """Return how many tokens a character of what was asked makes: not those that the chat template adds to each."""
    characters, counted = [row["characters"] for row in held], [row["input_length"] for row in held]
    if len(set(characters)) > 1:
        slope = statistics.linear_regression(characters, counted).slope
        if slope > 0:
            return slope
    return float(sum(counted) / max(1, sum(characters)))
