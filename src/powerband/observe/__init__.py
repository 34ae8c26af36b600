"""The stage `observe`: does the traffic still match what the recipe was measured with, and does the SLO still hold?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import powerband.verify as verify
from powerband import untrusted
from powerband.core import plain_data
from powerband.core.prefix_hash import FINE_BLOCK_CHARS, block_hashes, message_text
from powerband.core.recipe import ALERT_RATIO, Recipe
from powerband.core.statistics import wilson
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.evaluate.tasks import Task
from powerband.load import prompts, tokens
from powerband.observe.drift import Alarm, DriftDetector, RequestFeatures
from powerband.runtime import model_files
from powerband.serve import FleetSpec, ModelSpec
from powerband.serve.router.capture import rotated
from powerband.store import documents

RequestRecord = dict[str, Any]  # one line of a fleet's `traffic.jsonl`
Report = Callable[[str], None]
TaskLoader = Callable[[Recipe], Mapping[str, Task]]  # returns the tasks of a recipe's quality floor

_REFERENCE_REQUESTS = 2000
_RECENT_REQUESTS = 500  # the latency check uses the last ones only
_MIN_TOKENS = 10_000  # a rate over fewer tokens is too noisy to judge
_AXIS_LABELS = {
    "prompt": "prompt length",
    "output": "output length",
    "prefix_share": "shared prefix",
    "turns": "turns per session",
}
_RATE_LABELS = {"prefix_hits_tokens": "prefix-cache hit rate", "spec_accepted_tokens": "draft acceptance rate"}


@dataclass(frozen=True)
class Observation:
    """A fleet's traffic and figures, compared with its recipe."""

    recipe: Recipe
    records: Sequence[RequestRecord]
    drifted: tuple[Alarm, ...]
    broken: tuple[str, ...]  # the recipe's figures that no longer hold, a sentence each

    @property
    def requests(self) -> int:
        """Return how many requests were compared."""
        return len(self.records)

    @property
    def verdict(self) -> str:
        """Return 'in region', 'drifted' or 'broken'."""
        return "broken" if self.broken else "drifted" if self.drifted else "in region"

    def problems(self) -> list[str]:
        """Return one sentence for each broken figure and each axis that drifted."""
        drifted = [
            f"{_AXIS_LABELS.get(one.axis, one.axis)} is {one.side} since"
            f" {datetime.fromtimestamp(one.since_s):%F %T} (detected at request {one.request})"
            for one in self.drifted
        ]
        return [*self.broken, *drifted]


async def observe_once(
    folder: Path, model: str | None, *, probe: TaskLoader | None = None, report: Report = lambda _: None
) -> Observation:
    """Compare a running fleet with its recipe; with `probe`, also check a replica's answers against the reference."""
    model_spec = FleetSpec.read(folder).model(model)
    recipe = documents.read_as(Recipe, Path(model_spec.path))
    replicas = _replicas(folder, model_spec)
    observation = observe(recipe, read_records(folder, model_spec), [one["gauges"] for one in replicas])
    urls = [one["engine"] for one in replicas if one["engine"]]
    if probe is None or not urls:
        return observation
    spec = verify.VerifySpec(recipe, tasks=dict(probe(recipe)))
    check = await verify.probe(spec, urls[0], folder=folder, report=report)
    if check.found != "broken":
        report(f"quality: {check.found}, {check.said}")
        return observation
    return replace(observation, broken=(*observation.broken, f"quality: {check.said}"))


def _replicas(folder: Path, model_spec: ModelSpec) -> list[dict[str, Any]]:
    """Return the replicas of a recipe from the fleet's last status."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except OSError:
        return []
    return [one for one in status["replicas"] if one["recipe"] == model_spec.recipe]


def observe(
    recipe: Recipe, records: Sequence[RequestRecord], gauges: Sequence[Mapping[str, float]] = ()
) -> Observation:
    """Compare captured requests and the engines' metrics with a recipe."""
    detector = DriftDetector(reference_traffic(recipe.workload, recipe.promise.rate_per_s, source=recipe.model))
    alarms: dict[tuple[str, str], Alarm] = {}
    for row in features(records):
        for one in detector.update(row):
            alarms.setdefault((one.axis, one.side), one)
    broken = (*_slo_violations(recipe, records[-_RECENT_REQUESTS:]), *_low_rates(recipe, gauges))
    return Observation(recipe, records, tuple(alarms.values()), broken)


def _slo_violations(recipe: Recipe, records: Sequence[RequestRecord]) -> Iterator[str]:
    """Yield a sentence for each bound of the SLO that is significantly violated."""
    for metric, share, limit in recipe.promise.slo.bounds():
        seen = [row[f"{metric}_s"] for row in records if row.get(f"{metric}_s") is not None]
        if seen and (within := wilson(sum(one <= limit for one in seen), len(seen))).high < share:
            yield f"{metric.upper()} <= {limit:g} s in {within.value:.1%} of {len(seen)} requests (SLO: {share:.0%})"


def _low_rates(recipe: Recipe, gauges: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield a sentence for each rate of the engines that is far below the recipe's."""
    for part, whole, recipe_rate in recipe.promise.proven_shares():
        total = sum(one.get(whole, 0.0) for one in gauges)
        rate = sum(one.get(part, 0.0) for one in gauges) / total if total else recipe_rate
        limit = ALERT_RATIO * recipe_rate
        if total >= _MIN_TOKENS and rate < limit:
            yield f"{_RATE_LABELS[part]} is {rate:.0%} (recipe: {recipe_rate:.0%}, limit: {limit:.0%})"


def reference_traffic(
    workload: Workload, rate_per_s: float, *, source: str, count: int = _REFERENCE_REQUESTS
) -> list[RequestFeatures]:
    """Return the features of the traffic that a recipe was measured with.

    A workload from `capture` has them in its trace. Any other workload is sampled: `count` sessions.
    """
    if workload.trace and (captured := _captured(Path(workload.trace.path))):
        return captured
    vocabulary = tokens.vocabulary(model_files.location(source))
    traffic = prompts.prepare(workload.at_rate(rate_per_s), count, vocabulary=vocabulary, base=None)
    seen: set[int] = set()
    found = []
    for number, at_s in enumerate(traffic.due_s):
        chat: list[dict[str, str]] = []
        for turn in range(traffic.turns):
            index = number * traffic.turns + turn
            chat = traffic.messages(number, turn=turn, earlier=chat)
            text = "".join(message_text(one["role"], one["content"]) for one in chat)
            share = shared_prefix_share(block_hashes(text, FINE_BLOCK_CHARS), seen)
            found.append(RequestFeatures(at_s, len(text), traffic.output_tokens[index], share, turn + 1))
            chat.append({"role": "assistant", "content": "word " * traffic.output_tokens[index]})
    return sorted(found, key=lambda row: row.at_s)


def _captured(trace: Path) -> list[RequestFeatures]:
    """Return the features of a trace that `capture` wrote; nothing for other traces."""
    if trace.suffix != ".jsonl":
        return []
    lines = untrusted.lines(trace)
    first = next(lines, "")
    if '"characters"' not in first:
        return []
    return features([_record(line, trace, number) for number, line in enumerate(itertools.chain([first], lines), 1)])


def shared_prefix_share(block_ids: Sequence[int], seen: set[int]) -> float:
    """Return the share of leading blocks that earlier requests had too, and add the blocks to `seen`."""
    shared = 0
    for one in block_ids:
        if one not in seen:
            break
        shared += 1
    seen.update(block_ids)
    return shared / len(block_ids) if block_ids else 0.0


def read_records(folder: Path, model_spec: ModelSpec) -> list[RequestRecord]:
    """Return the captured requests of a model's current recipe, in order of arrival."""
    path = folder / "traffic.jsonl"
    if not path.exists():
        raise InputError(f"no captured traffic in {folder}", hint="run 'powerband serve' with --capture")
    complete = (
        _record(line, file, number)
        for file in (rotated(path), path)
        if file.exists()
        for number, line in enumerate(untrusted.lines(file), 1)
        if line.endswith("\n")
    )
    own = (row for row in complete if row.get("model") == model_spec.name and row.get("recipe") == model_spec.recipe)
    return sorted(own, key=lambda row: float(row["timestamp"]))


_NUMBERS = ("timestamp", "input_length", "output_length", "characters", "turns")


def _record(line: str, file: Path, number: int) -> RequestRecord:
    """Return one captured request; raise InputError if a number of it is missing or impossible."""
    try:
        row = plain_data.parse_json_object(line)
        for name in _NUMBERS:
            if not 0 <= row[name] < 2**53:
                raise ValueError(f"{name} is {row[name]}")
        if not all(isinstance(one, int) for one in row["hash_ids"]):
            raise ValueError("a block id is not a number")
        return row
    except (LookupError, TypeError, ValueError) as error:
        hint = "capture the traffic again, or remove the line"
        raise InputError(f"{file}:{number}: not a captured request: {error!r}"[:500], hint=hint) from None


def features(records: Sequence[RequestRecord]) -> list[RequestFeatures]:
    """Return the features of captured requests that drift detection compares."""
    seen: set[int] = set()
    return [
        RequestFeatures(
            row["timestamp"] / 1000,
            row["characters"],
            row["output_length"],
            shared_prefix_share(row["hash_ids"], seen),
            row["turns"],
        )
        for row in records
    ]
