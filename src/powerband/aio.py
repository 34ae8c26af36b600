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
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.errors import InputError, InvalidMeasurement

if TYPE_CHECKING:
    from powerband.bench import Profile
    from powerband.bench import Progress as BenchProgress
    from powerband.core.engine import Problem, StepProgress
    from powerband.runtime.replica import Replica
    from powerband.tune import Progress as TuneProgress
    from powerband.verify import VerifyResult

__all__ = ["bench", "evaluate", "plan", "tune", "verify"]

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
    ready_timeout: Duration = "600s",
    output: str | Path | None = None,
    force: bool = False,
    command: str = "",
    stopping: threading.Event | None = None,
    progress: BenchProgress | None = None,
    on_problem: Callable[[Problem], None] = _ignore,
    on_start: Callable[[Replica, str], None] = _ignore,
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
    prepared = local.prepare(deployment, engine_path=engine_path)
    for problem in prepared.problems:
        on_problem(problem)
    folder = inputs.folder(output) if output else runs.new_run(f"bench-{deployment.served_name}")
    timeout_s = inputs.seconds(ready_timeout)
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
    questions: int = 200,
    full: bool = False,
    refresh: bool = False,
    run_code: bool = False,
    workload: str | Path | Workload | None = None,
    samples: int = 24,
    engine: str | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    report: Callable[[str], None] = _ignore,
    on_step: Callable[[StepProgress], None] = _ignore,
) -> Evaluation:
    """Compare the answers of a deployment with those of the reference; the verdict is pass, fail or undecided."""
    import powerband.evaluate as stage
    from powerband.evaluate.probes import probes
    from powerband.launchers import local
    from powerband.load import prompts, tokens

    before = local.prepare(inputs.deployment(reference, engine=None))
    after = local.prepare(inputs.deployment(candidate, engine=engine, settings=set))
    floor, source = inputs.floor(quality), before.deployment.variant.source
    if floor is None:
        raise InputError("evaluate needs a quality floor", hint="use strict, balanced, lenient or a file")
    tasks = await asyncio.to_thread(
        inputs.tasks,
        inputs.names(task),
        floor,
        source=source,
        max_questions=questions,
        echoes_prompt_logprobs=before.engine.echoes_prompt_logprobs and after.engine.echoes_prompt_logprobs,
        run_code=run_code,
        on_step=on_step,
    )
    texts: list[str] = []
    if workload is not None:
        document, base = inputs.workload(workload), inputs.base(workload)
        texts = prompts.prepare(document, 48, vocabulary=tokens.vocabulary(source), base=base).texts()
    spec = stage.EvaluateSpec(
        floor=floor, probes=probes(texts, samples=samples), tasks=tasks, run_all=full, ignore_cache=refresh
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
    from powerband.store.journal import Journal

    if on != "this-machine":
        raise InputError(
            f"--on {on}: trials run on this machine only",
            hint=f"run tune on that machine, or predict it with 'powerband plan {model} --on {on}'",
        )
    folder = inputs.folder(output)
    if not resume and (folder / "trials.jsonl").exists():
        raise InputError(
            f"{folder} already contains a study", hint="continue it with --resume, or choose another --output"
        )
    floor = inputs.floor(quality)
    tasks = await asyncio.to_thread(
        inputs.tasks, inputs.names(task), floor, source=str(model), max_questions=200, on_step=on_step
    )
    spec = stage.TuneSpec(
        model=str(model),
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
    study, recipe = await stage.tune(spec, folder=folder, stopping=stopping, progress=progress)
    blocks = Journal(folder / "validation.jsonl").read()
    (folder / "report.html").write_text(study_report.page(study, recipe, blocks))
    return recipe


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
    from powerband.store import documents, runs

    known = recipe if isinstance(recipe, Recipe) else documents.read_as(Recipe, recipe)
    if slo is not None:
        known = known.model_copy(update={"promise": known.promise.model_copy(update={"slo": inputs.slo(slo)})})
    data = dict(known.deployment)
    data["config"] = inputs.with_knobs(data.get("config") or {}, set)
    if source:
        data["variant"] = {**data["variant"], "source": source}
    known = known.model_copy(update={"deployment": data})
    tasks = await asyncio.to_thread(
        inputs.tasks, inputs.names(task), known.promise.quality, source=known.model, max_questions=200, on_step=on_step
    )
    folder = inputs.folder(output) if output else runs.new_run(f"verify-{known.name or 'recipe'}")
    spec = stage.VerifySpec(known, tasks=tasks, engine_path=engine_path, seed=seed)
    return await stage.verify(spec, folder=folder, report=report)
