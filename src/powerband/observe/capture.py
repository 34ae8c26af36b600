"""Turn captured requests into a workload: lengths, arrival times, shared prefixes, and optionally sampled prompts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from powerband.core.prefix_hash import FINE_BLOCK_CHARS
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.observe import RequestRecord

_MAX_PROMPTS = 1000


def capture(records: Sequence[RequestRecord], folder: Path, *, name: str) -> Path:
    """Write captured requests as a workload for `bench` and `tune`, and return its path.

    The trace has lengths, arrival times and shared prefixes, and no prompt text.
    """
    if not records:
        raise InputError("no request has been captured yet", hint="send requests to the fleet, then run it again")
    trace = folder / f"{name}-trace.jsonl"
    per_character = _tokens_per_character(records)
    kept = ("timestamp", "output_length", "hash_ids", "characters", "turns")  # `observe` needs the last two
    lines = [
        {"input_length": max(1, round(per_character * row["characters"])), **{key: row[key] for key in kept}}
        for row in records
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in lines))
    workload = Workload.model_validate(
        {
            "name": name,
            "description": f"captured: {len(records)} requests",
            "arrivals": {"process": "trace"},
            "trace": {"path": trace.name, "block_tokens": max(1, round(FINE_BLOCK_CHARS * per_character))},
        }
    )
    _write_prompts(records, folder / f"{name}-prompts.jsonl")
    path = folder / f"{name}.yaml"
    path.write_text(workload.to_text())
    return path


def _write_prompts(records: Sequence[RequestRecord], path: Path) -> None:
    """Write a sample of the prompts as a dataset for `bench`, `evaluate` and `quantize`, if text was captured."""
    prompts = [row["messages"] for row in records if row.get("messages")]
    if prompts:
        step = max(1, len(prompts) // _MAX_PROMPTS)
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in prompts[::step][:_MAX_PROMPTS]))


def _tokens_per_character(records: Sequence[RequestRecord]) -> float:
    """Return the tokens per prompt character, without the constant number that the chat template adds."""
    characters, counted = [row["characters"] for row in records], [row["input_length"] for row in records]
    if len(set(characters)) > 1:
        slope = statistics.linear_regression(characters, counted).slope
        if slope > 0:
            return slope
    return float(sum(counted) / max(1, sum(characters)))
