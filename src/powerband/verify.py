"""The stage `verify`: check on this machine whether a recipe still meets its promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import powerband.bench as bench
import powerband.evaluate as gate
from powerband._callable import make_callable
from powerband.bench.profiles import inconclusive, sustains
from powerband.core.deployment import Deployment
from powerband.core.measurement import Level
from powerband.core.recipe import Recipe
from powerband.core.units import about_bytes
from powerband.errors import DeploymentRefused, EngineError, PowerbandError
from powerband.evaluate.probes import probes
from powerband.evaluate.tasks import Task
from powerband.launchers import local, recipe_devices
from powerband.launchers.local import Prepared
from powerband.reports import html
from powerband.runtime import devices, model_files
from powerband.runtime.replica import Replica
from powerband.store import documents

_SEED = 2_000_000  # workload seed of requests that neither search nor validation used
_MAX_RUNS = 3  # of the promised rate
_MEMORY_FACTOR, _MEMORY_SLACK_BYTES = 1.2, 256 * 2**20  # that an engine may take beyond the recipe

CheckResult = Literal["holds", "broken", "undecided"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """The result for one promise of the recipe."""

    promise: str
    found: CheckResult
    said: str


@dataclass
class VerifyResult:
    """The checks, and what differs from the machine and engine of the validation."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> CheckResult:
        """Return the overall result: a recipe with one broken promise is broken."""
        results = {one.found for one in self.checks}
        return "broken" if "broken" in results else "undecided" if "undecided" in results else "holds"

    def to_records(self) -> list[dict[str, Any]]:
        """Return a flat row for each of the checks."""
        return [asdict(one) for one in self.checks]

    def _repr_html_(self) -> str:
        """Return the checks as an HTML table, for a notebook."""
        return html.table(["promise", "result", "details"], [[one.promise, one.found, one.said] for one in self.checks])


@dataclass(frozen=True)
class VerifySpec:
    """The recipe to verify, and how."""

    recipe: Recipe
    tasks: dict[str, Task] = field(default_factory=dict)
    engine_path: str | None = None
    seed: int = 0
    changed: bool = False  # the deployment has other knobs than the measured one


async def verify(spec: VerifySpec, *, folder: Path, report: Report = lambda _: None) -> VerifyResult:
    """Start the deployment and check weights, latency at the promised rate, memory and quality."""
    recipe, found = spec.recipe, VerifyResult()
    deployment = deployment_of(recipe.deployment)
    recipe_devices.require(recipe, deployment, devices.this_host(), changed=spec.changed)
    try:
        report("read the weights")
        if await asyncio.to_thread(model_files.digest, deployment.variant.full_source) != recipe.weights_digest:
            found.checks.append(Check("weights", "broken", "their digest differs from the recipe's"))
        report("start the engine")
        prepared = local.prepare(deployment, engine_path=spec.engine_path)
        found.notes += _differences(recipe, prepared)
        try:
            quality_check = await _prepare_quality(spec, report)
        except PowerbandError as error:
            quality_check = None
            found.checks.append(Check("quality", "undecided", f"the reference failed: {error.message}"))
        async with local.launch(prepared, directory=folder) as replica:
            found.checks.append(Check("start", "holds", "the engine started"))
            level = await _measure_promised_rate(spec, prepared, replica, folder, report)
            found.checks.append(_latency(level, recipe.promise.rate_per_s))
            used_bytes = replica.memory_bytes()
            if recipe.promise.memory_bytes and used_bytes is not None:  # before the quality check, as in the validation
                found.checks.append(_memory(used_bytes, recipe.promise.memory_bytes))
            if quality_check:
                found.checks.append(await _quality(quality_check, prepared, replica, report))
    except (EngineError, DeploymentRefused) as error:
        found.checks.append(Check("start", "broken", error.message))
    return found


async def probe(spec: VerifySpec, url: str, *, folder: Path, report: Report = lambda _: None) -> Check:
    """Check the quality of a running replica against the reference."""
    quality_check = await _prepare_quality(spec, report)
    if quality_check is None:
        return Check("quality", "undecided", "the recipe has no quality floor")
    # forced, since the replica already runs and its memory is in use
    prepared = local.prepare(deployment_of(spec.recipe.deployment), force=True)
    async with local.attach(prepared, url, directory=folder) as replica:
        return await _quality(quality_check, prepared, replica, report)


def deployment_of(data: dict[str, Any]) -> Deployment[Any]:
    """Return the deployment of a recipe."""
    kind = documents.document_type(Deployment.kind, data, source="the recipe")
    found = kind.validate_data(data, source="the recipe's deployment", lines={})
    assert isinstance(found, Deployment)
    return found


def _differences(recipe: Recipe, prepared: Prepared) -> list[str]:
    """Return what differs in machine and engine from the validation of the recipe."""
    recorded, now = recipe.provenance.get("machine"), prepared.host.described()
    machine = recorded if isinstance(recorded, dict) else {}  # nothing checks what a recipe's author wrote there
    pairs = {
        "engine version": (recipe.engine_version, prepared.installation.version),
        "engine build": (recipe.provenance.get("engine_build"), prepared.installation.build),
        **{name: (machine.get(name), now[name]) for name in ("cpu", "cores", "gpus")},
    }
    return [f"{name}: recipe has {was}, this machine {now}" for name, (was, now) in pairs.items() if was != now]


@dataclass(frozen=True)
class QualityCheck:
    """The quality reference, and what to evaluate."""

    reference: Prepared
    spec: gate.EvaluateSpec


async def _prepare_quality(spec: VerifySpec, report: Report) -> QualityCheck | None:
    """Get the reference's answers before the candidate starts, so that the two do not share the machine."""
    floor, reference = spec.recipe.promise.quality, spec.recipe.reference
    if floor is None or not reference:
        return None
    lengths = [one for name in ("prompt_tokens", "output_tokens") if (one := spec.recipe.validity.get(name))]
    wanted = probes(traffic_tokens=round(sum(one.high for one in lengths)))
    found = QualityCheck(
        local.prepare(deployment_of(reference)), gate.EvaluateSpec(floor, wanted, tasks=spec.tasks, ignore_cache=True)
    )
    await gate.ensure_reference_answers(
        found.reference, found.spec, progress=lambda message: report(f"quality: {message}")
    )
    return found


async def _quality(check: QualityCheck, prepared: Prepared, replica: Replica, report: Report) -> Check:
    try:
        judged = await gate.evaluate(
            check.reference,
            prepared,
            check.spec,
            running=replica,
            progress=lambda message: report(f"quality: {message}"),
        )
    except PowerbandError as error:
        return Check("quality", "undecided", error.message)
    verdicts: dict[str, CheckResult] = {"pass": "holds", "fail": "broken", "undecided": "undecided"}
    return Check("quality", verdicts[judged.verdict], judged.reason)


async def _measure_promised_rate(
    spec: VerifySpec, prepared: Prepared, replica: Replica, folder: Path, report: Report
) -> Level:
    """Measure the promised rate, and repeat an inconclusive or failed run; the promise is broken if two runs fail."""
    recipe, failed = spec.recipe, 0
    for number in range(_MAX_RUNS):
        report(f"measure {recipe.promise.rate_per_s:.3g} req/s, run {number + 1}")
        seed = _SEED + 100 * spec.seed + 10 * number  # a run uses one seed for each of its blocks
        workload = recipe.workload.with_seed(seed).at_rate_if_open(recipe.promise.rate_per_s)
        bench_spec = bench.BenchSpec(workload=workload, slo=recipe.promise.slo, blocks=2, stop_early=True)
        found = await bench.bench(replica, prepared, bench_spec, directory=folder)
        level = found.levels[-1]
        sustained = sustains(level, recipe.promise.rate_per_s)
        failed += not sustained and not inconclusive(level)
        if sustained or failed > 1:
            break
    (folder / "measurement.json").write_text(found.to_json())
    return level


def _latency(level: Level, rate_per_s: float) -> Check:
    latencies = [
        f"{one.metric.upper()} {one.percentile} {one.value_s * 1e3:.0f} ms (limit {one.limit_s * 1e3:.0f} ms)"
        for one in level.slo_checks
        if one.value_s is not None
    ]
    detail = f"at {level.load}: {', '.join(latencies) or level.verdict}"
    if sustains(level, rate_per_s):
        return Check("SLO", "holds", detail)
    if inconclusive(level):
        return Check("SLO", "undecided", "; ".join(one.sentence for one in level.failed_guards))
    if level.meets_slo:
        slow = f"sustained {level.achieved_per_s:.3g} req/s of the promised {rate_per_s:.3g}" if level.users else ""
        detail = f"at {level.load}: {'; '.join(one.sentence for one in level.failed_guards) or slow or level.verdict}"
    return Check("SLO", "broken", detail)


def _memory(used_bytes: int, recipe_bytes: int) -> Check:
    limit_bytes = round(_MEMORY_FACTOR * recipe_bytes + _MEMORY_SLACK_BYTES)
    detail = f"{about_bytes(used_bytes)} (recipe {about_bytes(recipe_bytes)}, limit {about_bytes(limit_bytes)})"
    return Check("memory", "holds" if used_bytes <= limit_bytes else "broken", detail)


make_callable(__name__)
