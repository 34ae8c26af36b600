"""The stage `verify`: does a recipe still hold here?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from powerband import bench
from powerband import evaluate as gate
from powerband.bench.profiles import inconclusive, sustains
from powerband.core.deployment import Deployment
from powerband.core.measurement import Level
from powerband.core.recipe import Recipe
from powerband.core.units import about_bytes
from powerband.errors import DeploymentRefused, EngineError, PowerbandError
from powerband.evaluate.probes import probes
from powerband.evaluate.tasks import Task
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime import model_files
from powerband.runtime.replica import Replica
from powerband.store import documents

_SEED = 2_000_000  # requests that neither the search nor the proof saw
_TRIES = 3
_MEMORY_SPARE, _MEMORY_ROOM = 1.2, 256 * 2**20

Found = Literal["holds", "broken", "cannot say"]


@dataclass(frozen=True)
class Check:
    """One promise of the recipe, and what came of it."""

    promise: str
    found: Found
    said: str


@dataclass
class Verified:
    """What `verify` found."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> Found:
        """Return the verdict: one broken promise breaks the recipe."""
        every = {one.found for one in self.checks}
        return "broken" if "broken" in every else "cannot say" if "cannot say" in every else "holds"


@dataclass(frozen=True)
class VerifySpec:
    """What to prove again."""

    recipe: Recipe
    tasks: dict[str, Task] = field(default_factory=dict)
    engine_path: str | None = None
    seed: int = 0


async def verify(order: VerifySpec, *, folder: Path, say: Callable[[str], None] = lambda _: None) -> Verified:
    """Start it, hold its answers against the reference and its latencies against the SLO, and weigh it."""
    recipe, found = order.recipe, Verified()
    deployment = deployed(recipe.deployment)
    try:
        now = model_files.digest(deployment.variant.source)
        if now != recipe.weights_digest:
            found.checks.append(Check("weights", "broken", "they are not those that the recipe was proven with"))
        say("start the engine")
        prepared = local.prepare(deployment, engine_path=order.engine_path)
        found.notes += _differences(recipe, prepared)
        try:
            judging = await _judging(order, say)
        except PowerbandError as error:
            judging = None
            found.checks.append(Check("quality", "cannot say", f"the reference: {error.message}"))
        async with local.launch(prepared, directory=folder) as replica:
            found.checks.append(Check("start", "holds", "the engine starts and is ready"))
            level = await _hold(order, prepared, replica, folder, say)
            found.checks.append(_latency(level, recipe.promise.rate_per_s))
            if recipe.promise.memory_bytes and replica.process:  # as it was proven: before anything else is asked
                found.checks.append(_memory(replica.process.memory_bytes(), recipe.promise.memory_bytes))
            if judging:
                found.checks.append(await _quality(judging, prepared, replica, say))
    except (EngineError, DeploymentRefused) as error:
        found.checks.append(Check("start", "broken", error.message))
    return found


async def probe(order: VerifySpec, url: str, *, folder: Path, say: Callable[[str], None] = lambda _: None) -> Check:
    """Hold the answers of a replica that runs already against the reference's."""
    judging = await _judging(order, say)
    if judging is None:
        return Check("quality", "cannot say", "the recipe promises none")
    prepared = local.prepare(deployed(order.recipe.deployment), force=True)  # it has its memory
    async with local.attach(prepared, url, directory=folder) as replica:
        return await _quality(judging, prepared, replica, say)


def deployed(data: dict[str, Any]) -> Deployment[Any]:
    """Return the deployment that a recipe holds."""
    kind = documents.document_type(Deployment.kind, data, source="the recipe")
    found = kind.validate_data(data, source="the recipe's deployment", lines={})
    assert isinstance(found, Deployment)
    return found


def _differences(recipe: Recipe, prepared: Prepared) -> list[str]:
    """Say what is not as it was when the recipe was proven."""
    machine, now = recipe.provenance.get("machine", {}), prepared.host.described()
    pairs = {
        "engine version": (recipe.engine_version, prepared.installation.version),
        "engine build": (recipe.provenance.get("engine_build"), prepared.installation.build),
        **{name: (machine.get(name), now[name]) for name in ("cpu", "cores", "gpus")},
    }
    return [f"{name}: {was} then, {now} now" for name, (was, now) in pairs.items() if was != now]


@dataclass(frozen=True)
class Judging:
    """Whom answers are held against, and what is asked."""

    reference: Prepared
    asked: gate.EvaluateSpec


async def _judging(order: VerifySpec, say: Callable[[str], None]) -> Judging | None:
    """Ask the reference first, where the recipe promises quality: beside the candidate it would be in its way."""
    floor, reference = order.recipe.promise.quality, order.recipe.reference
    if floor is None or not reference:
        return None
    found = Judging(
        local.prepare(deployed(reference)), gate.EvaluateSpec(floor, probes(), tasks=order.tasks, again=True)
    )
    await gate.consult(found.reference, found.asked, progress=lambda said: say(f"quality: {said}"))
    return found


async def _quality(judging: Judging, prepared: Prepared, replica: Replica, say: Callable[[str], None]) -> Check:
    try:
        judged = await gate.evaluate(
            judging.reference,
            prepared,
            judging.asked,
            running=replica,
            progress=lambda said: say(f"quality: {said}"),
        )
    except PowerbandError as error:
        return Check("quality", "cannot say", error.message)
    verdicts: dict[str, Found] = {"pass": "holds", "fail": "broken", "undecided": "cannot say"}
    return Check("quality", verdicts[judged.verdict], judged.reason)


async def _hold(
    order: VerifySpec, prepared: Prepared, replica: Replica, folder: Path, say: Callable[[str], None]
) -> Level:
    """Hold the promised rate, again where something disturbed it; a promise is broken when it broke twice."""
    recipe, broken = order.recipe, 0
    for number in range(_TRIES):
        say(f"hold {recipe.promise.rate_per_s:.3g}/s{', once more' if number else ''}")
        seed = _SEED + 100 * order.seed + 10 * number  # each block of a measurement takes one
        workload = recipe.workload.with_seed(seed).carrying(recipe.promise.rate_per_s)
        asked = bench.BenchSpec(workload=workload, slo=recipe.promise.slo, blocks=2, hopeless=True)
        found = await bench.bench(replica, prepared, asked, directory=folder)
        level = found.levels[-1]
        kept = sustains(level, recipe.promise.rate_per_s)
        broken += not kept and not inconclusive(level)
        if kept or broken > 1:
            break
    (folder / "measurement.json").write_text(found.to_json())
    return level


def _latency(level: Level, rate_per_s: float) -> Check:
    told = [
        f"{one.metric.upper()} {one.percentile} {one.value_s * 1e3:.0f} ms of {one.limit_s * 1e3:.0f}"
        for one in level.slo_checks
        if one.value_s is not None
    ]
    said = f"at {level.load}: {', '.join(told) or level.verdict}"
    if sustains(level, rate_per_s):
        return Check("SLO", "holds", said)
    if inconclusive(level):
        return Check("SLO", "cannot say", "; ".join(one.sentence for one in level.refused))
    if level.meets_slo:
        slow = f"answered at {level.achieved_per_s:.3g}/s, and {rate_per_s:.3g}/s is promised" if level.users else ""
        said = f"at {level.load}: {'; '.join(one.sentence for one in level.refused) or slow or level.verdict}"
    return Check("SLO", "broken", said)


def _memory(now: int, then: int) -> Check:
    said = f"{about_bytes(now)}, and {about_bytes(then)} when it was proven"
    return Check("memory", "holds" if now <= _MEMORY_SPARE * then + _MEMORY_ROOM else "broken", said)
