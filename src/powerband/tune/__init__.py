"""The stage `tune`: from a model, traffic and two promises to the deployment that keeps both for the least money."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from powerband import engines, plan
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.recipe import Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import UNBOUND, Interval
from powerband.core.study import Settings, Study, Trial, best, usual_s
from powerband.errors import PromiseBroken
from powerband.plan import calibrate, expect
from powerband.plan.predict import Requests
from powerband.runtime import devices
from powerband.store import runs
from powerband.store.journal import Journal
from powerband.tune import ray_workers, resume, speculation, validation
from powerband.tune.search import Expected, Search
from powerband.tune.search_space import ENGINE, WEIGHTS, SearchSpace
from powerband.tune.spec import TuneSpec, runner_of
from powerband.tune.trial_runner import Attempt, TrialRunner

__all__ = ["Progress", "TuneSpec", "expectations", "explore", "tune"]

_SEARCHED = 0.6  # of the time at most; the rest proves the answer
_LEAST_TRIALS = 4


@dataclass
class Progress:
    """Who is told how it goes."""

    on_space: Callable[[SearchSpace], None] = lambda _: None
    on_try: Callable[[int, Settings], None] = lambda *_: None
    on_trials: Callable[[Sequence[Trial]], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None


async def tune(
    order: TuneSpec, *, folder: Path, stopping: threading.Event | None = None, listener: Progress | None = None
) -> tuple[Study, Recipe]:
    """Search, then prove. All is noted in the folder; one that holds notes goes on where they end."""
    rig, study = await explore(order, folder=folder, stopping=stopping, listener=listener)
    if study.best is None:
        raise PromiseBroken(
            f"none of {len(study.trials)} trials kept both promises", hint=f"see why in {folder / 'study.json'}"
        )
    recipe = await validation.prove(rig, study, budget_s=order.budget_s)
    runs.write_atomic(folder / "recipe.yaml", recipe.to_text())
    return study, recipe


async def explore(
    order: TuneSpec, *, folder: Path, stopping: threading.Event | None = None, listener: Progress | None = None
) -> tuple[TrialRunner, Study]:
    """Search: try deployments until the time for it is over."""
    listener = listener or Progress()
    rig = runner_of(order, folder, stopping=stopping, say=listener.say)
    resume.note(order, rig.levers, folder)
    rig.levers, drafted = await speculation.measured(rig)
    own = rig.levers
    listener.on_space(own)
    listener.say("ask the plan")
    requests = plan.draw(order.workload, rig.model, base=order.base)
    expected = expectations(rig.model, devices.this_host(), own, requests, order.slo)
    search = Search(own, expected=expected, seed=order.seed)
    with ray_workers.workers(order, rig) if order.cluster else nullcontext([rig.attempt]) as hands:
        rig.at_once = len(hands)
        trials = await _search(order, rig, search, listener, hands)
    study = Study(
        name=f"{rig.model.name}-{order.workload.name or 'workload'}",
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
    runs.write_atomic(folder / "study.json", study.to_json())
    return rig, study


async def _search(
    order: TuneSpec, rig: TrialRunner, search: Search, listener: Progress, hands: Sequence[Attempt]
) -> list[Trial]:
    """Try until the time for it is over, as many at once as there are hands; what was noted before counts."""
    journal = Journal(rig.folder / "trials.jsonl")
    trials = [Trial.model_validate(note) for note in journal.read()]
    for trial in trials:
        rig.remember(trial)
    free, running = list(hands), dict[asyncio.Task[Trial | None], tuple[Attempt, Trial]]()

    def note(trial: Trial) -> None:
        rig.remember(trial)
        trials.append(trial)
        journal.add(trial.model_dump(mode="json", exclude_defaults=True))
        listener.on_trials(trials)

    def begin() -> bool:
        """Begin with the next trial, or rule it out; tell whether there was one."""
        begun = [about for _, about in running.values()]
        started = len(begun) + sum(one.outcome != "ruled out" for one in trials)
        most = order.most_trials or len(search.everything)
        if rig.stopping.is_set() or started >= most or _spent(order, rig, trials):
            return False
        if (settings := search.next([*trials, *begun])) is None:
            return False
        expected = search.expectation(settings)
        number = 1 + max((one.number for one in (*trials, *begun)), default=0)
        rival = best(trials) if rig.levers.turned(settings) else None  # what all is compared with is measured whole
        # Until it is tried it counts as tried and worth nothing, so that nobody else begins with the same.
        about = Trial(number=number, settings=settings, outcome="ruled out", expected_per_s=expected)
        if expected and rival and rival.max_rate_per_s and expected.high < rival.max_rate_per_s:
            reason = f"the plan expects at most {expected.high:.3g}/s, and {rival.max_rate_per_s:.3g}/s were found"
            note(about.model_copy(update={"reason": reason}))
            return True
        listener.on_try(number, settings)
        hand = free.pop()
        running[asyncio.ensure_future(hand(number, settings, expected=expected, best=rival))] = hand, about
        return True

    listener.on_trials(trials)
    try:
        while True:
            while free and begin():
                pass
            if not running:
                return trials
            for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                hand, about = running.pop(task)
                if found := task.result():
                    note(found)
                    free.append(hand)
                else:
                    listener.say(f"trial {about.number} is lost with the machine that tried it")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _spent(order: TuneSpec, rig: TrialRunner, trials: Sequence[Trial]) -> bool:
    """Tell whether the time is needed to prove what was found."""
    gone_s = rig.gone_s(trials)
    if gone_s > _SEARCHED * order.budget_s:
        return True
    return len(trials) >= _LEAST_TRIALS and gone_s + validation.least_s(usual_s(trials)) > order.budget_s


def expectations(model: Model, host: Host, own: SearchSpace, requests: Requests, slo: SLO) -> Expected:
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
