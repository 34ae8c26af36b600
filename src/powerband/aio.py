"""The stages as async functions: keyword arguments named as on the command line, results that are the documents.

`powerband.plan`, `bench`, `evaluate`, `tune` and `verify` are the blocking forms of these.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerband import inputs
from powerband.core.deployment import Deployment
from powerband.core.evaluation import Evaluation
from powerband.core.measurement import Measurement
from powerband.core.plan import Plan
from powerband.core.quality import QualityFloor
from powerband.core.recipe import Recipe
from powerband.core.rehearsal import Rehearsal
from powerband.core.slo import SLO
from powerband.core.study import Study
from powerband.core.workload import Workload
from powerband.errors import InputError, InvalidMeasurement, RequirementNotMet

if TYPE_CHECKING:
    from powerband.bench import Profile
    from powerband.bench import Progress as BenchProgress
    from powerband.core.engine import Problem, StepProgress
    from powerband.runtime.replica import Replica
    from powerband.tune import Progress as TuneProgress
    from powerband.verify import VerifyResult

__all__ = ["bench", "evaluate", "plan", "rehearse", "tune", "verify"]

Names = str | Sequence[str]
Duration = str | float


def _ignore(*_: Any) -> None:
    pass


async def plan(
    model: str | Path,
    *,
    on: Names = (),
    inventory: str | Path | None = None,
    workload: str | Path | Workload = "chat",
    slo: str | Path | SLO = "interactive",
    quality: str | Path | QualityFloor | None = "balanced",
    load: float | None = None,
    engine: str | None = None,
    scheme: Names = (),
    speculate: str | None = None,
    price: float | Names = (),
) -> Plan:
    """Return the candidate deployments ranked by predicted cost; no accelerator is used."""
    import powerband.plan as stage
    from powerband.plan import calibrate
    from powerband.runtime import model_files

    spec = stage.PlanSpec(
        model=model_files.architecture(str(model)),
        workload=inputs.workload(workload),
        slo=inputs.slo(slo),
        offers=tuple(inputs.offers(inputs.names(on), inventory, prices=inputs.Prices(price))),
        engine=engine,
        schemes=tuple(inputs.names(scheme)),
        floor=inputs.floor(quality),
        load_per_s=load,
        speculation=inputs.speculation(speculate),
        base=inputs.base(workload),
        calibrated=calibrate.saved(),
    )
    return await asyncio.to_thread(stage.plan, spec)


async def bench(
    what: str | Path | Deployment[Any] = "golden",
    *,
    workload: str | Path | Workload = "chat",
    slo: str | Path | SLO | None = None,
    profile: Profile = "level",
    rate: float | None = None,
    users: int | None = None,
    rates: Sequence[float] = (),
    duration: Duration | None = None,
    requests: int | None = None,
    blocks: int = 1,
    seed: int | None = None,
    max_in_flight: int = 0,
    senders: int = 1,
    price: float | Names = (),
    tokenizer: str | None = None,
    engine: str | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    engine_path: str | None = None,
    ready_timeout: Duration | None = None,
    output: str | Path | None = None,
    force: bool = False,
    command: str = "",
    stopping: threading.Event | None = None,
    progress: BenchProgress | None = None,
    on_problem: Callable[[Problem], None] = _ignore,
    on_start: Callable[[Replica, str], None] = _ignore,
    report: Callable[[str], None] = _ignore,
) -> Measurement:
    """Measure a server under load and write the files of the run to `output`.

    Raises InvalidMeasurement if a guard rejects it, unless `force` is set. A missed SLO is part of the result:
    `measurement.best` is then None.
    """
    import powerband.bench as stage
    from powerband.bench.profiles import Amount
    from powerband.launchers import local
    from powerband.plan import expect
    from powerband.reports import html
    from powerband.store import runs

    spec = stage.BenchSpec(
        workload=inputs.workload(workload, rate=None if profile == "climb" else rate, users=users),
        slo=inputs.slo(slo) if slo is not None else None,
        profile=profile,
        rates=tuple(rates),
        start_per_s=rate,
        amount=Amount(window_s=inputs.seconds(duration) if duration else None, requests=requests, seed=seed),
        base=inputs.base(workload),
        blocks=blocks,
        max_in_flight=max_in_flight,
        senders=senders,
        price_per_h=inputs.price_here(price),
        tokenizer=tokenizer,
        command=command,
    )
    engine = "fake" if what == "golden" and engine is None else engine
    deployment = inputs.deployment(what, engine=engine, settings=set)
    prepared = local.prepare(await local.fetched(deployment, report=report), engine_path=engine_path)
    for problem in prepared.problems:
        on_problem(problem)
    folder = inputs.folder(output) if output else runs.new_run(f"bench-{deployment.served_name}")
    timeout_s = inputs.seconds(ready_timeout) if ready_timeout else None
    async with local.launch(prepared, directory=folder, ready_timeout_s=timeout_s, on_change=on_start) as replica:
        found = await stage.bench(replica, prepared, spec, directory=folder, stopping=stopping, progress=progress)
    found = expect.with_expected(found, deployment, model=prepared.model, host=prepared.host, base=spec.base)
    (folder / "measurement.json").write_text(found.to_json())
    (folder / "report.html").write_text(html.measurement(found))
    if not force and (rejection := rejected(found)):
        raise rejection
    return found


def rejected(found: Measurement) -> InvalidMeasurement | None:
    """Return the error of a measurement that guards reject; a climb that found no rate is a valid answer."""
    if found.valid or found.interrupted or (found.profile == "climb" and found.best is None):
        return None
    failed = [one for level in found.levels for one in level.failed_guards]
    reasons = "; ".join(dict.fromkeys(one.sentence for one in failed)) or "no level was measured"
    hint = f"{failed[0].hint}; " if failed else ""
    return InvalidMeasurement(f"invalid measurement: {reasons}", hint=f"{hint}--force prints it, marked as invalid")


async def evaluate(
    candidate: str | Path | Deployment[Any],
    *,
    reference: str | Path | Deployment[Any],
    quality: str | Path | QualityFloor = "balanced",
    task: Names = (),
    questions: int = inputs.MAX_QUESTIONS,
    full: bool = False,
    refresh: bool = False,
    run_code: bool = False,
    workload: str | Path | Workload | None = None,
    samples: int = 24,
    reserve: Duration = "15min",
    engine: str | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    report: Callable[[str], None] = _ignore,
    on_step: Callable[[StepProgress], None] = _ignore,
) -> Evaluation:
    """Compare the answers of a deployment with those of the reference; the verdict is pass, fail or undecided."""
    import powerband.evaluate as stage
    from powerband.evaluate import probes as probing
    from powerband.launchers import local
    from powerband.load import prompts, tokens
    from powerband.runtime import model_files

    before = local.prepare(await local.fetched(inputs.deployment(reference, engine=None), report=report))
    served = inputs.deployment(candidate, engine=engine, settings=set)
    after = local.prepare(await local.fetched(served, report=report))
    floor, files = inputs.floor(quality), model_files.location(before.deployment.variant.full_source)
    if floor is None:
        raise InputError("evaluate needs a quality floor", hint="use strict, balanced, lenient or a file")
    tasks = await asyncio.to_thread(
        inputs.tasks,
        inputs.names(task),
        floor,
        source=str(files),
        max_questions=questions,
        echoes_prompt_logprobs=before.engine.echoes_prompt_logprobs and after.engine.echoes_prompt_logprobs,
        run_code=run_code,
        on_step=on_step,
    )
    texts: list[str] = []
    traffic_tokens = 0
    if workload is not None:
        document, base = inputs.workload(workload), inputs.base(workload)
        traffic = prompts.prepare(document, 48, vocabulary=tokens.vocabulary(files), base=base)
        texts, traffic_tokens = traffic.texts(), prompts.long_tokens((one[1], one[2]) for one in traffic.requests())
    spec = stage.EvaluateSpec(
        floor,
        probing.probes(texts, samples=samples, traffic_tokens=traffic_tokens),
        probing.reserve(texts, samples=samples),
        inputs.seconds(reserve),
        tasks,
        run_all=full,
        ignore_cache=refresh,
    )
    return await stage.evaluate(before, after, spec, progress=report)


async def tune(
    model: str | Path,
    *,
    workload: str | Path | Workload = "chat",
    slo: str | Path | SLO = "interactive",
    quality: str | Path | QualityFloor | None = "balanced",
    task: Names = (),
    on: str = "this-machine",
    engine: Names = (),
    scheme: Names = (),
    budget: Duration = "2h",
    trials: int | None = None,
    requests: int | None = None,
    launcher: str = "local",
    cluster: str = "auto",
    price: float | Names = (),
    seed: int = 0,
    output: str | Path = "study",
    resume: bool = False,
    stopping: threading.Event | None = None,
    progress: TuneProgress | None = None,
    on_step: Callable[[StepProgress], None] = _ignore,
) -> Recipe:
    """Search this machine, validate the best configurations and return the recipe; the study is in `output`.

    Raises RequirementNotMet if no configuration meets both the SLO and the quality floor.
    """
    import powerband.tune as stage
    from powerband.reports import study as study_report
    from powerband.runtime import hub, model_files
    from powerband.store import documents
    from powerband.store.journal import Journal

    if on != "this-machine":
        raise InputError(
            f"--on {on}: trials run on this machine only",
            hint="run tune on that machine, or add --rehearse to play the study in virtual time",
        )
    stage.search.check_extra()
    folder = inputs.folder(output)
    if not resume and (folder / "trials.jsonl").exists():
        raise InputError(
            f"{folder} already contains a study", hint="continue it with --resume, or choose another --output"
        )
    pinned = await hub.fetch(str(model), report=progress.report if progress else _ignore)
    files = str(model_files.location(pinned))
    floor = inputs.floor(quality)
    tasks = await asyncio.to_thread(inputs.tasks, inputs.names(task), floor, source=files, on_step=on_step)
    spec = stage.TuneSpec(
        model=pinned,
        workload=inputs.workload(workload),
        slo=inputs.slo(slo),
        floor=floor,
        tasks=tasks,
        engines=tuple(inputs.names(engine)),
        schemes=tuple(inputs.names(scheme)),
        budget_s=inputs.seconds(budget),
        max_trials=trials,
        requests=requests,
        usd_per_h=inputs.price_here(price),
        seed=seed,
        base=inputs.base(workload),
        cluster=cluster if launcher == "ray" else "",
    )
    report = folder / "report.html"
    try:
        study, recipe = await stage.tune(spec, folder=folder, stopping=stopping, progress=progress)
    except (RequirementNotMet, InvalidMeasurement) as error:
        if (folder / "study.json").exists():
            found = documents.read_as(Study, folder / "study.json")
            report.write_text(study_report.page_without_recipe(found, error.message))
        raise
    report.write_text(study_report.page(study, recipe, Journal(folder / "validation.jsonl").read()))
    return recipe


async def rehearse(
    model: str | Path,
    *,
    workload: str | Path | Workload = "chat",
    slo: str | Path | SLO = "interactive",
    quality: str | Path | QualityFloor | None = "balanced",
    on: str = "this-machine",
    engine: Names = (),
    scheme: Names = (),
    budget: Duration = "2h",
    trials: int | None = None,
    requests: int | None = None,
    price: float | Names = (),
    seed: int = 0,
    report: Callable[[str], None] = _ignore,
) -> Rehearsal:
    """Play a study in virtual time on devices that need not be here: its duration, cost and likely recipe."""
    from powerband.plan.options import host_of
    from powerband.runtime import devices
    from powerband.tune import TuneSpec
    from powerband.tune import budget as durations
    from powerband.tune import rehearse as stage

    if on == "all":
        raise InputError("a study runs on one machine", hint="name its devices: --on h100:8")
    (offer,), here = inputs.offers([on], None, prices=inputs.Prices(price)), on == "this-machine"
    host = devices.this_host() if here else host_of(offer.device, offer.count)
    spec = TuneSpec(
        model=str(model),
        workload=inputs.workload(workload),
        slo=inputs.slo(slo),
        floor=inputs.floor(quality),
        engines=tuple(inputs.names(engine)),
        schemes=tuple(inputs.names(scheme)),
        budget_s=inputs.seconds(budget),
        max_trials=trials,
        requests=requests,
        usd_per_h=offer.usd_per_h,
        seed=seed,
        base=inputs.base(workload),
    )
    earlier = durations.recall() if here else {}
    return await asyncio.to_thread(stage.rehearse, spec, host=host, earlier=earlier, report=report)


async def verify(
    recipe: str | Path | Recipe,
    *,
    slo: str | Path | SLO | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    source: str | None = None,
    task: Names = (),
    engine_path: str | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    report: Callable[[str], None] = _ignore,
    on_step: Callable[[StepProgress], None] = _ignore,
) -> VerifyResult:
    """Check whether a recipe still holds on this machine, as it is or with something changed."""
    import powerband.verify as stage
    from powerband.launchers import local
    from powerband.runtime import model_files
    from powerband.store import documents, runs

    known = recipe if isinstance(recipe, Recipe) else documents.read_as(Recipe, recipe)
    if slo is not None:
        known = known.model_copy(update={"promise": known.promise.model_copy(update={"slo": inputs.slo(slo)})})
    data = dict(known.deployment)
    data["config"] = inputs.with_knobs(data.get("config") or {}, set)
    changed = data["config"] != (known.deployment.get("config") or {})
    if source:
        data["variant"] = {**data["variant"], "source": source, "revision": None}
    deployment = await local.fetched(stage.deployment_of(data), report=report)
    known = known.model_copy(update={"deployment": deployment.to_data(units=True)})
    files = str(model_files.location(known.model) or known.model)
    tasks = await asyncio.to_thread(
        inputs.tasks, inputs.names(task), known.promise.quality, source=files, on_step=on_step
    )
    folder = inputs.folder(output) if output else runs.new_run(f"verify-{known.name or 'recipe'}")
    spec = stage.VerifySpec(known, tasks=tasks, engine_path=engine_path, seed=seed, changed=changed)
    return await stage.verify(spec, folder=folder, report=report)
