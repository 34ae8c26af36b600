"""The stage `observe`: is a fleet's traffic still what its recipe was proven with, and does the recipe still hold?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.core.beginnings import FINE, chain, said
from powerband.core.recipe import Recipe
from powerband.core.statistics import wilson
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import prompts, tokens
from powerband.observe.drift import Alarm, Drift, Row

Note = dict[str, Any]  # a line of what a fleet noted

_PROVEN = 2000  # requests that are drawn to compare with


@dataclass(frozen=True)
class Observation:
    """What `observe` says."""

    requests: int
    drifted: tuple[Alarm, ...]
    late: str  # by how much the latency promise is broken; empty where it is not

    @property
    def found(self) -> str:
        """Return the verdict."""
        return "broken" if self.late else "drifted" if self.drifted else "in region"


def observe(recipe: Recipe, rows: Sequence[Row], ttft_s: Sequence[float]) -> Observation:
    """Hold what was seen of a fleet against its recipe."""
    drift = Drift(proven(recipe.workload, recipe.promise.rate_per_s, source=recipe.model))
    alarms: dict[tuple[str, str], Alarm] = {}
    for row in rows:
        for one in drift.see(row):
            alarms.setdefault((one.axis, one.side), one)
    return Observation(len(rows), tuple(alarms.values()), _late(recipe, ttft_s))


def _late(recipe: Recipe, ttft_s: Sequence[float]) -> str:
    for metric, share, limit in recipe.promise.slo.bounds():
        if metric == "ttft" and ttft_s:
            kept = wilson(sum(one <= limit for one in ttft_s), len(ttft_s))
            if kept.high < share:
                return f"{kept.value:.1%} of the first tokens came within {limit:g} s, {share:.0%} are promised"
    return ""


def proven(workload: Workload, rate_per_s: float, *, source: str, count: int = _PROVEN) -> list[Row]:
    """Draw the traffic that a recipe was proven with, as a fleet would have seen it."""
    traffic = prompts.prepare(workload.at_rate(rate_per_s), count, vocabulary=tokens.vocabulary(source), base=None)
    seen: set[int] = set()
    found = []
    for number, at_s in enumerate(traffic.due_s):
        chat: list[dict[str, str]] = []
        for turn in range(traffic.turns):
            place = number * traffic.turns + turn
            chat = traffic.messages(number, turn=turn, earlier=chat)
            text = "".join(said(one["role"], one["content"]) for one in chat)
            share = known_share(chain(text, FINE), seen)
            found.append(Row(at_s, len(text), traffic.output_tokens[place], share, turn + 1))
            chat.append({"role": "assistant", "content": "word " * traffic.output_tokens[place]})
    return sorted(found, key=lambda row: row.at_s)


def known_share(ids: Sequence[int], seen: set[int]) -> float:
    """Return the share of blocks that others began with too, and remember these."""
    known = 0
    for one in ids:
        if one not in seen:
            break
        known += 1
    seen.update(ids)
    return known / len(ids) if ids else 0.0


def notes(folder: Path, model: str) -> list[Note]:
    """Read what a fleet noted of a model's traffic, in the order in which it came."""
    path = folder / "traffic.jsonl"
    if not path.exists():
        raise InputError(f"{folder} holds no notes of its traffic", hint="serve with --capture")
    whole = (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return sorted((row for row in whole if row["model"] == model), key=lambda row: float(row["timestamp"]))


def rows(held: Sequence[Note]) -> list[Row]:
    """Return what is compared with what the recipe was proven with."""
    seen: set[int] = set()
    return [
        Row(
            row["timestamp"] / 1000,
            row["characters"],
            row["output_length"],
            known_share(row["hash_ids"], seen),
            row["turns"],
        )
        for row in held
    ]


def first_tokens(held: Sequence[Note]) -> list[float]:
    """Return how long each first token took."""
    return [row["ttft_s"] for row in held if row["ttft_s"] is not None]


def captured(held: Sequence[Note], folder: Path, *, name: str) -> Path:
    """Write what a fleet noted as a workload for `bench` and `tune`: lengths, times, which beginnings were shared."""
    if not held:
        raise InputError("the fleet has answered nothing yet", hint="wait for traffic")
    trace = folder / f"{name}-trace.jsonl"
    per_character = _tokens_per_character(held)
    kept = ("timestamp", "output_length", "hash_ids")
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
    path = folder / f"{name}.yaml"
    path.write_text(workload.to_text())
    return path


def _tokens_per_character(held: Sequence[Note]) -> float:
    """Return how many tokens a character of what was asked makes: not those that the chat template adds to each."""
    characters, counted = [row["characters"] for row in held], [row["input_length"] for row in held]
    if len(set(characters)) > 1:
        slope = statistics.linear_regression(characters, counted).slope
        if slope > 0:
            return slope
    return float(sum(counted) / max(1, sum(characters)))
