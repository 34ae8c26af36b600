"""The stage `tune`: from a model, traffic and two promises to the deployment that keeps both for the least money."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from powerband import engines, plan
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.quality import QualityFloor
from powerband.core.recipe import Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import UNBOUND, Interval
from powerband.core.study import Settings, Study, Trial, best, usual_s
from powerband.core.workload import Workload
from powerband.errors import EngineMissing, PromiseBroken
from powerband.evaluate.exams import Exam
from powerband.plan import calibrate, expect
from powerband.plan.predict import Requests
from powerband.runtime import devices, environment, weights
from powerband.store import runs
from powerband.store.journal import Journal
from powerband.tune import drafts, finals
from powerband.tune.levers import ENGINE, WEIGHTS, Levers, levers
from powerband.tune.rig import Rig
from powerband.tune.search import Expected, Search

_SEARCHED = 0.6  # of the time at most; the rest proves the answer
_LEAST_TRIALS = 4


@dataclass(frozen=True)
class Order:
    """What to find the best deployment for."""

    model: str
    workload: Workload
    slo: SLO
    floor: QualityFloor | None = None  # None: whatever the answers are
    tasks: Mapping[str, Exam] = field(default_factory=dict)
    engines: tuple[str, ...] = ()  # none: every one that is installed and can load the model
    schemes: tuple[str, ...] = ()
    budget_s: float = 7200.0
    most_trials: int | None = None
    requests: int | None = None  # at each load, at the least
    usd_per_h: float | None = None
    seed: int = 0
    base: Path | None = None  # of the workload's own paths


@dataclass
class Listener:
    """Who is told how it goes."""

    on_space: Callable[[Levers], None] = lambda _: None
    on_try: Callable[[int, Settings], None] = lambda *_: None
    on_trials: Callable[[Sequence[Trial]], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None


async def tune(
    order: Order, *, folder: Path, stopping: threading.Event | None = None, listener: Listener | None = None
) -> tuple[Study, Recipe]:
    """Search, then prove. All is noted in the folder; one that holds notes goes on where they end."""
    rig, study = await explore(order, folder=folder, stopping=stopping, listener=listener)
    if study.best is None:
        raise PromiseBroken(
            f"none of {len(study.trials)} trials kept both promises", hint=f"see why in {folder / 'study.json'}"
        )
    recipe = await finals.prove(rig, study, left_s=order.budget_s - sum(one.seconds for one in study.trials))
    runs.keep(folder / "recipe.yaml", recipe.to_text())
    return study, recipe


async def explore(
    order: Order, *, folder: Path, stopping: threading.Event | None = None, listener: Listener | None = None
) -> tuple[Rig, Study]:
    """Search: try deployments until the time for it is over."""
    listener = listener or Listener()
    host, needs_weights = devices.this_host(), not order.engines or engines.get(order.engines[0]).reads_weights
    model = weights.inspect(order.model) if needs_weights else Model(source=order.model)
    requests = plan.draw(order.workload, model, base=order.base)
    names = _engines(order, model)
    own = levers(
        model,
        host,
        context=requests.lengths.longest,
        wanted=names,
        schemes=order.schemes,
        drafts=drafts.telling(order.workload),
    )
    rig = Rig(
        model=model,
        workload=order.workload,
        slo=order.slo,
        floor=order.floor,
        levers=own,
        folder=folder,
        usd_per_h=order.usd_per_h or plan.this_machine(host)[0].price.usd_per_h,
        base=order.base,
        requests=order.requests,
        tasks=dict(order.tasks),
        stopping=stopping or threading.Event(),
        say=listener.say,
    )
    rig.levers, drafted = await drafts.measured(rig)
    own = rig.levers
    listener.on_space(own)
    listener.say("ask the plan")
    search = Search(own, expected=expectations(model, host, own, requests, order.slo), seed=order.seed)
    trials = await _search(order, rig, search, listener)
    study = Study(
        name=f"{model.name}-{order.workload.name or 'workload'}",
        model=order.model,
        workload=order.workload,
        slo=order.slo,
        quality=order.floor,
        seed=order.seed,
        usd_per_h=rig.usd_per_h,
        levers={engine: {one.name: tuple(one.settings) for one in held} for engine, held in own.by_engine.items()},
        drafts=drafted,
        trials=tuple(trials),
    )
    runs.keep(folder / "study.json", study.to_json())
    return rig, study


async def _search(order: Order, rig: Rig, search: Search, listener: Listener) -> list[Trial]:
    """Try until the time for it is over; what was noted before counts."""
    journal = Journal(rig.folder / "trials.jsonl")
    trials = [Trial.model_validate(note) for note in journal.read()]
    for trial in trials:
        rig.remember(trial)
    most = order.most_trials or len(search.everything)
    while not rig.stopping.is_set():
        listener.on_trials(trials)
        started = sum(one.outcome != "ruled out" for one in trials)
        if started >= most or _spent(order, trials):
            break
        settings = search.next(trials)
        if settings is None:
            break
        expected, number = search.expectation(settings), len(trials) + 1
        rival = best(trials) if rig.levers.turned(settings) else None  # what all is compared with is measured whole
        if expected and rival and rival.knee_per_s and expected.high < rival.knee_per_s:
            reason = f"the plan expects at most {expected.high:.3g}/s, and {rival.knee_per_s:.3g}/s were found"
            trial = Trial(number=number, settings=settings, outcome="ruled out", reason=reason, expected_per_s=expected)
        else:
            listener.on_try(number, settings)
            trial = await rig.attempt(number, settings, expected=expected, best=rival)
        rig.remember(trial)
        trials.append(trial)
        journal.add(trial.model_dump(mode="json", exclude_defaults=True))
    return trials


def _spent(order: Order, trials: Sequence[Trial]) -> bool:
    """Tell whether the time is needed to prove what was found."""
    gone_s = sum(one.seconds for one in trials)
    if gone_s > _SEARCHED * order.budget_s:
        return True
    return len(trials) >= _LEAST_TRIALS and gone_s + finals.least_s(usual_s(trials)) > order.budget_s


def _engines(order: Order, model: Model) -> list[str]:
    """Return the engines to try: those that were named, or that are here and can load the model or a variant of it."""
    if order.engines:
        return list(order.engines)
    found = []
    for name in ("vllm", "llamacpp"):
        can_load = model.format in engines.get(name).formats or model.format == "safetensors"
        try:
            environment.find(name)
        except EngineMissing:
            continue
        found += [name] if can_load else []
    if not found:
        raise EngineMissing(
            "no engine that can load the model is on this machine", hint="run 'powerband engine install llamacpp'"
        )
    return found


def expectations(model: Model, host: Host, own: Levers, requests: Requests, slo: SLO) -> Expected:
    """Return what the plan expects of settings; without a calibration it ranks them, and bounds nothing."""
    known = calibrate.kept()
    seen: dict[tuple[str, ...], Interval | None] = {}

    def expected(settings: Settings) -> Interval | None:
        engine = engines.get(settings[ENGINE])
        if engine.scheduling is None:
            return None
        data = {"variant": {"source": model.source}, "engine": engine.name, "config": own.config(settings)}
        deployment = engines.deployment_of(data)
        choice = engine.choice_of(deployment, model=model, host=host)
        alike = choice.model_copy(update={"scheme": settings[WEIGHTS], "drafted": 0}).model_dump_json()
        key = (engine.name, alike)
        if key not in seen:
            on = expect.deployed(deployment, model=model, host=host, known=known, scheme=settings[WEIGHTS])
            found = expect.knee(on, requests, slo) if on else None
            sure = on is not None and bool(on.times.coefficients.devices)
            seen[key] = found if sure or found is None else Interval(found.value, 0.0, UNBOUND)
        return seen[key]

    return expected
