"""The stage `tune`: find the cheapest deployment of a model that meets an SLO and a quality floor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import powerband.plan as plan
from powerband import engines
from powerband._callable import make_callable
from powerband.bench.level_controller import LevelStatus
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.recipe import Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import UNBOUNDED, Interval
from powerband.core.study import ENGINE, Settings, Study, Trial, best, render_settings, typical_trial_s
from powerband.errors import RequirementNotMet
from powerband.plan import calibrate, expect
from powerband.plan.predict import Requests
from powerband.runtime import devices
from powerband.store import runs
from powerband.store.journal import Journal
from powerband.tune import ray_workers, resume, speculation, validation
from powerband.tune.search import Expected, Search
from powerband.tune.search_space import WEIGHTS, SearchSpace
from powerband.tune.spec import TuneSpec, make_runner
from powerband.tune.trial_runner import RunTrial, TrialRunner

__all__ = ["Progress", "TuneSpec", "expectations", "explore", "tune"]

_SEARCH_SHARE = 0.6  # of the budget at most; the rest is for validation
_MIN_TRIALS = 4  # before the search stops early to leave time for validation


@dataclass
class Progress:
    """Callbacks that report progress."""

    on_space: Callable[[SearchSpace], None] = lambda _: None
    on_trial_start: Callable[[int, Settings], None] = lambda *_: None
    on_trials: Callable[[Sequence[Trial]], None] = lambda _: None
    report: Callable[[str], None] = lambda _: None
    on_status: Callable[[LevelStatus], None] = lambda _: None


async def tune(
    spec: TuneSpec, *, folder: Path, stopping: threading.Event | None = None, progress: Progress | None = None
) -> tuple[Study, Recipe]:
    """Search, then validate. Results are journaled in the folder, and a study that it holds resumes."""
    runner, study = await explore(spec, folder=folder, stopping=stopping, progress=progress)
    if study.best is None:
        raise _nothing_feasible(study, len(runner.space), folder)
    recipe = await validation.validate(runner, study, budget_s=spec.budget_s)
    runs.write_atomic(folder / "recipe.yaml", recipe.to_text())
    return study, recipe


async def explore(
    spec: TuneSpec, *, folder: Path, stopping: threading.Event | None = None, progress: Progress | None = None
) -> tuple[TrialRunner, Study]:
    """Run trials until the search's share of the budget is spent; return the runner and the study."""
    progress = progress or Progress()
    runner = make_runner(spec, folder, stopping=stopping, report=progress.report, on_status=progress.on_status)
    resume.check_spec(spec, runner.space, folder)
    runner.space, speculation_results = await speculation.measure(runner)
    space = runner.space
    progress.on_space(space)
    progress.report("predict the max rate of each configuration")
    requests = plan.sample_requests(spec.workload, runner.model, base=spec.base)
    expected = expectations(runner.model, devices.this_host(), space, requests, spec.slo)
    search = Search(space, expected=expected, seed=spec.seed)
    with ray_workers.workers(spec, runner) if spec.cluster else nullcontext([runner.run_trial]) as workers:
        runner.parallel_trials = len(workers)
        trials = await _search(spec, runner, search, progress, workers)
    study = Study(
        name=f"{runner.model.name}-{spec.workload.name or 'workload'}",
        model=spec.model,
        workload=spec.workload,
        slo=spec.slo,
        quality=spec.floor,
        seed=spec.seed,
        usd_per_h=runner.usd_per_h,
        levers={engine: {one.name: tuple(one.settings) for one in own} for engine, own in space.by_engine.items()},
        drafts=speculation_results,
        trials=tuple(trials),
    )
    runs.write_atomic(folder / "study.json", study.to_json())
    return runner, study


def _nothing_feasible(study: Study, configurations: int, folder: Path) -> RequirementNotMet:
    """Return the error of a study without a feasible trial: how many were tried, and the closest one."""
    tried = [one for one in study.trials if one.outcome != "ruled out"]
    slow = [one for one in tried if one.outcome == "too slow"]
    closest = max(slow, key=lambda one: one.value, default=None)
    wanted = "the SLO and the quality floor" if study.quality else "the SLO"
    message = f"no configuration met {wanted}: {len(tried)} of {configurations} were tried"
    if closest:
        message += f". Closest: {render_settings(closest.settings, study.defaults)}, {closest.reason}"
    engines_tried = {one.settings[ENGINE] for one in study.trials}
    if untried := [engine for engine in study.levers if engine not in engines_tried]:
        return RequirementNotMet(
            message, hint=f"{' and '.join(untried)} not tried; rerun with --resume and a larger --budget"
        )
    return RequirementNotMet(message, hint=f"the reason of each trial is in {folder / 'study.json'}")


async def _search(
    spec: TuneSpec, runner: TrialRunner, search: Search, progress: Progress, workers: Sequence[RunTrial]
) -> list[Trial]:
    """Run trials until the time is spent, one at a time on each worker; trials in the journal count."""
    journal = Journal(runner.folder / "trials.jsonl")
    trials = [Trial.model_validate(entry) for entry in journal.read()]
    for trial in trials:
        runner.remember_quality(trial)
    free, running = list(workers), dict[asyncio.Task[Trial | None], tuple[RunTrial, Trial]]()

    def add(trial: Trial) -> None:
        runner.remember_quality(trial)
        trials.append(trial)
        journal.add(trial.model_dump(mode="json", exclude_defaults=True))
        progress.on_trials(trials)

    def start_next() -> bool:
        """Start the next trial, or rule it out; return whether there was one."""
        pending = [trial for _, trial in running.values()]
        started = len(pending) + sum(one.outcome != "ruled out" for one in trials)
        max_trials = spec.max_trials or len(search.candidates)
        if runner.stopping.is_set() or started >= max_trials or _time_is_spent(spec, runner, trials):
            return False
        if (settings := search.next([*trials, *pending])) is None:
            return False
        expected = search.expectation(settings)
        number = 1 + max((one.number for one in (*trials, *pending)), default=0)
        # Defaults are the baseline, so their climb does not stop at the rate of a better trial.
        incumbent = best(trials) if runner.space.non_default(settings) else None
        # While it runs it counts as a trial without value, so that no other worker gets the same settings.
        placeholder = Trial(number=number, settings=settings, outcome="ruled out", expected_per_s=expected)
        if expected and incumbent and incumbent.max_rate_per_s and expected.high < incumbent.max_rate_per_s:
            reason = (
                f"predicted max rate <= {expected.high:.3g} req/s; the best so far is {incumbent.max_rate_per_s:.3g}"
            )
            add(placeholder.model_copy(update={"reason": reason}))
            return True
        progress.on_trial_start(number, settings)
        worker = free.pop()
        task = asyncio.ensure_future(worker(number, settings, expected=expected, best=incumbent))
        running[task] = worker, placeholder
        return True

    progress.on_trials(trials)
    try:
        while True:
            while free and start_next():
                pass
            if not running:
                return trials
            for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                worker, placeholder = running.pop(task)
                if found := task.result():
                    add(found)
                    free.append(worker)
                else:
                    progress.report(f"trial {placeholder.number} was lost: its Ray node is gone")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _time_is_spent(spec: TuneSpec, runner: TrialRunner, trials: Sequence[Trial]) -> bool:
    """Return whether the rest of the budget is needed for validation."""
    elapsed_s = runner.elapsed_s(trials)
    if elapsed_s > _SEARCH_SHARE * spec.budget_s:
        return True
    validation_s = validation.min_duration_s(typical_trial_s(trials))
    return len(trials) >= _MIN_TRIALS and elapsed_s + validation_s > spec.budget_s


def expectations(model: Model, host: Host, space: SearchSpace, requests: Requests, slo: SLO) -> Expected:
    """Return the plan's prediction of the max rate; without a calibration it ranks settings but has no bounds."""
    known = calibrate.saved()
    cached: dict[tuple[str, ...], Interval | None] = {}

    def expected(settings: Settings) -> Interval | None:
        engine = engines.get(settings[ENGINE])
        if engine.scheduling is None:
            return None
        data = {"variant": {"source": model.source}, "engine": engine.name, "config": space.config(settings)}
        deployment = engines.deployment_of(data)
        choice = engine.settings_of(deployment, model=model, host=host)
        alike = choice.model_copy(update={"scheme": settings[WEIGHTS], "drafted": 0}).model_dump_json()
        key = (engine.name, alike)
        if key not in cached:
            on = expect.server_for(deployment, model=model, host=host, known=known, scheme=settings[WEIGHTS])
            found = expect.max_rate(on, requests, slo) if on else None
            calibrated = on is not None and bool(on.times.coefficients.devices)
            cached[key] = found if calibrated or found is None else Interval(found.value, 0.0, UNBOUNDED)
        return cached[key]

    return expected


make_callable(__name__)
