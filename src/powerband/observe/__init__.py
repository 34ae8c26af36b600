"""The stage `observe`: is a fleet's traffic still what its recipe was proven with, and does the recipe still hold?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from powerband import verify
from powerband.core.prefix_hash import FINE, block_hashes, said
from powerband.core.recipe import MUCH_LESS, Recipe
from powerband.core.statistics import wilson
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.evaluate.tasks import Task
from powerband.load import prompts, tokens
from powerband.observe.drift import Alarm, Drift, Row
from powerband.serve import FleetSpec, ModelSpec
from powerband.store import documents

Note = dict[str, Any]  # a line of what a fleet noted
Say = Callable[[str], None]
Exams = Callable[[Recipe], Mapping[str, Task]]  # the tasks that a recipe's floor asks for

_PROVEN = 2000  # requests that are drawn to compare with
_NOW = 500  # the last ones, by which latencies are judged
_COUNTED = 10_000  # tokens, before a share of them says anything


@dataclass(frozen=True)
class Observation:
    """What `observe` says."""

    recipe: Recipe
    held: Sequence[Note]  # what the fleet noted
    drifted: tuple[Alarm, ...]
    broken: tuple[str, ...]  # which figures of the recipe no longer hold, and by how much

    @property
    def requests(self) -> int:
        """Return how many were looked at."""
        return len(self.held)

    @property
    def found(self) -> str:
        """Return the verdict."""
        return "broken" if self.broken else "drifted" if self.drifted else "in region"

    def said(self) -> list[str]:
        """Return what is wrong, a sentence each."""
        moved = [
            f"{one.axis.replace('_', ' ')} is {one.side} since {datetime.fromtimestamp(one.since_s):%F %T}"
            f" (sure with request {one.request})"
            for one in self.drifted
        ]
        return [*self.broken, *moved]


async def observe_once(
    folder: Path, model: str | None, *, probe: Exams | None = None, say: Say = lambda _: None
) -> Observation:
    """Hold a fleet that runs in a folder against its recipe; where there are tasks to probe with, its answers too."""
    part = FleetSpec.read(folder).part(model)
    recipe = documents.of(Recipe, Path(part.path))
    seats = _seats(folder, part)
    found = observe(recipe, notes(folder, part), [one["gauges"] for one in seats])
    urls = [one["engine"] for one in seats if one["engine"]]
    if probe is None or not urls:
        return found
    check = await verify.probe(verify.VerifySpec(recipe, tasks=dict(probe(recipe))), urls[0], folder=folder, say=say)
    if check.found != "broken":
        say(f"answers: {check.found}, {check.said}")
        return found
    return replace(found, broken=(*found.broken, f"answers: {check.said}"))


def _seats(folder: Path, part: ModelSpec) -> list[dict[str, Any]]:
    """Return the replicas of a recipe, as they were last."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except OSError:
        return []
    return [one for one in status["replicas"] if one["recipe"] == part.recipe]


def observe(recipe: Recipe, held: Sequence[Note], gauges: Sequence[Mapping[str, float]] = ()) -> Observation:
    """Hold what a fleet noted, and what its engines count, against its recipe."""
    drift = Drift(proven(recipe.workload, recipe.promise.rate_per_s, source=recipe.model))
    alarms: dict[tuple[str, str], Alarm] = {}
    for row in rows(held):
        for one in drift.see(row):
            alarms.setdefault((one.axis, one.side), one)
    return Observation(recipe, held, tuple(alarms.values()), (*_late(recipe, held[-_NOW:]), *_less(recipe, gauges)))


def _late(recipe: Recipe, held: Sequence[Note]) -> Iterator[str]:
    """Yield which bounds of the SLO are broken beyond doubt."""
    for metric, share, limit in recipe.promise.slo.bounds():
        seen = [row[f"{metric}_s"] for row in held if row.get(f"{metric}_s") is not None]
        if seen and (kept := wilson(sum(one <= limit for one in seen), len(seen))).high < share:
            within = f"{metric.upper()} was within {limit:g} s in {kept.value:.1%} of {len(seen)} requests"
            yield f"{within}, {share:.0%} are promised"


def _less(recipe: Recipe, gauges: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield which of the engines' shares are far below the recipe's."""
    for part, whole, proven_share in recipe.promise.shares():
        counted = sum(one.get(whole, 0.0) for one in gauges)
        share = sum(one.get(part, 0.0) for one in gauges) / counted if counted else proven_share
        if counted >= _COUNTED and share < MUCH_LESS * proven_share:
            names = [one.replace("_", " ") for one in (part, whole)]
            yield f"{names[0]} are {share:.0%} of {names[1]}, {proven_share:.0%} when proven"


def proven(workload: Workload, rate_per_s: float, *, source: str, count: int = _PROVEN) -> list[Row]:
    """Draw the traffic that a recipe was proven with, as a fleet would have seen it; captured traffic was seen so."""
    if workload.trace and (kept := _captured(Path(workload.trace.path))):
        return kept
    traffic = prompts.prepare(workload.at_rate(rate_per_s), count, vocabulary=tokens.vocabulary(source), base=None)
    seen: set[int] = set()
    found = []
    for number, at_s in enumerate(traffic.due_s):
        chat: list[dict[str, str]] = []
        for turn in range(traffic.turns):
            place = number * traffic.turns + turn
            chat = traffic.messages(number, turn=turn, earlier=chat)
            text = "".join(said(one["role"], one["content"]) for one in chat)
            share = known_share(block_hashes(text, FINE), seen)
            found.append(Row(at_s, len(text), traffic.output_tokens[place], share, turn + 1))
            chat.append({"role": "assistant", "content": "word " * traffic.output_tokens[place]})
    return sorted(found, key=lambda row: row.at_s)


def _captured(trace: Path) -> list[Row]:
    """Return the rows of a trace that `capture` wrote; none of another's."""
    if trace.suffix != ".jsonl":
        return []
    held = [json.loads(line) for line in trace.read_text().splitlines()]
    return rows(held) if held and "characters" in held[0] else []


def known_share(ids: Sequence[int], seen: set[int]) -> float:
    """Return the share of blocks that others began with too, and remember these."""
    known = 0
    for one in ids:
        if one not in seen:
            break
        known += 1
    seen.update(ids)
    return known / len(ids) if ids else 0.0


def notes(folder: Path, part: ModelSpec) -> list[Note]:
    """Read what a fleet noted of the traffic that a recipe answered, in the order in which it came."""
    path = folder / "traffic.jsonl"
    if not path.exists():
        raise InputError(f"{folder} holds no notes of its traffic", hint="serve with --capture")
    whole = (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    own = (row for row in whole if row["model"] == part.name and row["recipe"] == part.recipe)
    return sorted(own, key=lambda row: float(row["timestamp"]))


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
