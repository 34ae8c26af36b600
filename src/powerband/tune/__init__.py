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
from powerband.core.study import ENGINE, Settings, Study, Trial, best, render_settings
from powerband.errors import InvalidMeasurement, PowerbandError, RequirementNotMet
from powerband.plan import calibrate, expect, predict
from powerband.plan.predict import Requests
from powerband.store import runs
from powerband.store.journal import Journal
from powerband.tune import budget, device_pool, ray_workers, resume, runnable, speculation, validation
from powerband.tune.device_pool import DevicePool
from powerband.tune.search import Expected, Search, Step
from powerband.tune.search_space import WEIGHTS, SearchSpace
from powerband.tune.spec import TuneSpec, make_runner
from powerband.tune.trial_runner import RunTrial, TrialRunner

__all__ = ["Progress", "TuneSpec", "expectations", "explore", "tune"]


@dataclass
class Progress:
    """Callbacks that report progress."""

    on_space: Callable[[SearchSpace, str], None] = lambda *_: None  # with what the budget can find
    on_trial_start: Callable[[int, Settings], None] = lambda *_: None
    on_trials: Callable[[Sequence[Trial]], None] = lambda _: None
    report: Callable[[str], None] = lambda _: None
    on_status: Callable[[LevelStatus], None] = lambda _: None


async def tune(
    spec: TuneSpec, *, folder: Path, stopping: threading.Event | None = None, progress: Progress | None = None
) -> tuple[Study, Recipe]:
    """Search, then validate. Results are journaled in the folder, and a study that it holds resumes.

    If no configuration meets the SLO and the quality floor, the error names the one that came nearest; study.json has
    all of them.
    """
    runner, study = await explore(spec, folder=folder, stopping=stopping, progress=progress)
    if study.best is None:
        raise nothing_feasible(study)
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
    requests = plan.sample_requests(spec.workload, runner.model, base=spec.base)
    expected = expectations(runner.model, runner.host, runner.space, requests, spec.slo)
    search = Search(runner.space, expected=expected, devices=runner.devices, seed=spec.seed, usd_per_h=runner.usd_per_h)
    runner.durations = durations(spec, runner, search)
    budget.check(runner.durations, spec.budget_s)
    progress.on_space(runner.space, budget.first_line(runner.durations, spec.budget_s, spec.max_trials))
    if impossible := runner.space.cannot_run:
        progress.report(f"{len(impossible)} combinations cannot run here: {next(iter(impossible.values()))}")
    runner.space, speculation_results = await speculation.measure(runner)
    space = runner.space
    if speculation_results:
        runner.space = space = runnable.narrowed(space, runner.model, runner.host)
        search = Search(space, expected=expected, devices=runner.devices, seed=spec.seed, usd_per_h=runner.usd_per_h)
    with ray_workers.workers(spec, runner) if spec.cluster else nullcontext(local_workers(runner)) as workers:
        runner.parallel_trials = len(workers)
        trials = await search_trials(spec, runner, search, progress, workers)
    budget.remember(trials)
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
        outlook=outlook(search, trials, runner.durations),
    )
    runs.write_atomic(folder / "study.json", study.to_json())
    return runner, study


def local_workers(runner: TrialRunner) -> list[RunTrial]:
    """Return as many functions that run a trial as trials fit on this machine's devices at the same time."""
    if (count := runner.durations.side_by_side) > 1:
        earlier = [Trial.model_validate(entry) for entry in Journal(runner.folder / "trials.jsonl").read()]
        runner.begin_side_by_side(earlier, DevicePool(device_pool.free_devices(runner.host)), count)
    return [runner.run_trial] * count


def durations(
    spec: TuneSpec, runner: TrialRunner, search: Search, *, earlier: budget.Earlier | None = None
) -> budget.Durations:
    """Return the predicted durations of the study's parts; `earlier` studies are by default those of this machine."""
    known, found = budget.recall() if earlier is None else earlier, budget.Durations(requests=runner.requests_per_level)
    best_per_s, default_per_s = [], []
    for engine in runner.space.by_engine:
        past = known.get(engine, {})
        found.starts_s[engine] = past.get("start_s") or budget.start_s(engine, runner.model.weight_bytes)

        def rate(settings: Settings, share: float = past.get("rate_over_plan", budget.UNCALIBRATED)) -> float:
            predicted = search.expectation(settings)
            return predicted.value * (1.0 if predicted.low > 0 else share) if predicted else 0.0

        best_per_s.append(max(rate(one) for one in search.candidates if one[ENGINE] == engine))
        default_per_s.append(rate(runner.space.defaults(engine)))
    found.best_per_s = max(best_per_s) or found.best_per_s
    found.default_per_s = max(default_per_s) or found.default_per_s
    found.gate_s = budget.REFERENCE_S + budget.CHECK_S + max(found.starts_s.values()) if spec.floor else 0.0
    found.configurations = len(runner.space)
    if not spec.cluster:
        found.fewest_devices = found.devices = min(map(search.devices, search.candidates))
        found.side_by_side = device_pool.side_by_side(runner.host, smallest=found.fewest_devices)
    return found


def nothing_feasible(study: Study) -> PowerbandError:
    """Return the error of a study without a feasible trial: how many were tried, the nearest, and what would help."""
    tried = [one for one in study.trials if one.outcome != "ruled out"]
    wanted = "the SLO and the quality floor" if study.quality else "the SLO"
    message = f"no configuration met {wanted}: {len(tried)} of {study.configurations} were tried"
    if tried and all(one.outcome == "inconclusive" for one in tried):
        return InvalidMeasurement(
            f"no configuration could be measured: {tried[0].reason}",
            hint="stop other work on this machine, then rerun with --resume",
        )
    if not (nearest := study.nearest):
        return RequirementNotMet(message, hint="read the reason of each trial above, or in study.json")
    message += f". Nearest: {render_settings(nearest.settings, study.defaults)}, {nearest.reason}"
    if nearest.outcome == "below the floor":
        return RequirementNotMet(message, hint="allow more schemes with --scheme, or choose a lower --quality floor")
    factor = f"{nearest.excess:.2g} times as " if nearest.excess and nearest.excess > 1 else ""
    hint = f"choose bounds {factor}long, a machine {factor}fast, or a smaller model"
    return RequirementNotMet(message, hint=hint if factor else "choose longer bounds, or a smaller model")


def outlook(search: Search, trials: Sequence[Trial], took: budget.Durations) -> str:
    """Return what another hour of search can find."""
    leader = best(trials)
    left = search.remaining(trials)
    able = [(one, rate) for one, rate in left if leader is None or times(search, one, rate.high, leader) > 1]
    if not able:
        return "another hour would find nothing better: no configuration that was not tried can beat the best trial"
    looks = min(len(able), int(3600 / max(1.0, took.screen())))
    first, rate = able[0]
    gain = f", up to {times(search, first, rate.high, leader):.2g} times the requests per dollar" if leader else ""
    if rate.high >= UNBOUNDED:
        gain = ""
    return (
        f"another hour would look at {looks} more of {len(able)} configurations that could win{gain}; "
        f"first {render_settings(first, search.space.all_defaults)}"
    )


def times(search: Search, settings: Settings, rate_per_s: float, leader: Trial) -> float:
    """Return the requests per dollar at a rate over those of the best trial."""
    rate_of_leader = leader.max_rate_per_s or UNBOUNDED
    return rate_per_s / search.devices(settings) / (rate_of_leader / leader.devices)


async def search_trials(
    spec: TuneSpec, runner: TrialRunner, search: Search, progress: Progress, workers: Sequence[RunTrial]
) -> list[Trial]:
    """Run trials until the time is spent, one at a time on each worker; trials in the journal count."""
    journal = Journal(runner.folder / "trials.jsonl")
    trials: dict[int, Trial] = {}
    for entry in journal.read():  # a trial that climbs after its screen has two entries
        trial = Trial.model_validate(entry)
        trials[trial.number] = trial
        runner.remember_quality(trial)
    free, running = list(workers), dict[asyncio.Task[Trial | None], tuple[RunTrial, Step]]()

    def done() -> list[Trial]:
        """Return the trials in the order of their last change."""
        return list(trials.values())

    def add(trial: Trial) -> None:
        runner.remember_quality(trial)
        trials.pop(trial.number, None)
        trials[trial.number] = trial
        journal.add(trial.model_dump(mode="json", exclude_defaults=True))
        runner.durations.learn(done(), list(runner.space.all_defaults.values()))
        progress.on_trials(done())

    def start_next() -> bool:
        """Start the next trial; return whether there was one."""
        # While it runs a trial has no value, and no other worker gets the same settings.
        pending = {one.number: Trial(number=one.number, settings=one.settings, outcome="ruled out")
                   for _, one in running.values()}  # fmt: skip
        seen = [*(one for one in done() if one.number not in pending), *pending.values()]
        step = None if runner.stopping.is_set() else _next_step(spec, runner, search, done(), seen)
        if step is None:
            return False
        progress.on_trial_start(step.number, step.settings)
        worker = free.pop()
        running[asyncio.ensure_future(worker(step))] = worker, step
        return True

    progress.on_trials(done())
    try:
        while True:
            while free and start_next():
                pass
            if not running:
                return sorted(done(), key=lambda one: one.number)
            for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                worker, step = running.pop(task)
                if found := task.result():
                    add(found)
                    free.append(worker)
                else:
                    progress.report(f"trial {step.number} was lost: its Ray node is gone")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _next_step(
    spec: TuneSpec, runner: TrialRunner, search: Search, trials: Sequence[Trial], seen: Sequence[Trial]
) -> Step | None:
    """Return the next step that the budget and the maximum number of trials allow.

    The engines' defaults are always looked at, and a study goes on until a trial is feasible. Screens of new settings
    leave time for the climbs, and climbs leave time for the validation.
    """
    took, ruled_out = runner.durations, {one.number for one in trials if one.outcome == "ruled out"}
    looked = sum(one.number not in ruled_out for one in seen)  # with those that run now
    elapsed_s, ends_s = runner.elapsed_s(trials), took.search_ends(spec.budget_s)
    climb_s = took.start_s + took.climb()
    room = looked < (spec.max_trials or len(runner.space))
    step = search.next(seen, screen=room and elapsed_s + took.screen() + climb_s <= ends_s)
    if step is None or not runner.space.non_default(step.settings):
        return step
    late = elapsed_s + climb_s > ends_s if best(trials) else elapsed_s > spec.budget_s
    return None if late else step


def expectations(model: Model, host: Host, space: SearchSpace, requests: Requests, slo: SLO) -> Expected:
    """Return the plan's prediction of the max rate; without a calibration it ranks settings but has no bounds.

    A simulation takes time, so there is one for each engine, scheme, split and chunk size; the fluid estimates of
    settings that share these give the ratios of their rates.
    """
    known = calibrate.saved()
    simulated: dict[tuple[object, ...], tuple[Interval, float]] = {}

    def expected(settings: Settings) -> Interval | None:
        engine = engines.get(settings[ENGINE])
        if engine.scheduling is None:
            return None
        deployment, scheme = engines.deployment_of(space.document(settings, model.source)), settings[WEIGHTS]
        server = expect.server_for(deployment, model=model, host=host, known=known, scheme=scheme)
        if server is None:
            return None
        fluid_per_s = predict.fluid_estimate(server, requests.lengths, slo).rate_per_s
        steps, chunk = server.times.steps, server.limits.batched_tokens
        alike = (engine.name, scheme, steps.split, chunk, server.times.device.bandwidth, server.times.factors)
        if alike not in simulated:
            simulated[alike] = expect.max_rate(server, requests, slo), fluid_per_s
        found, of_fluid_per_s = simulated[alike]
        ratio, calibrated = fluid_per_s / of_fluid_per_s, server.times.coefficients.devices
        low, high = (found.low * ratio, found.high * ratio) if calibrated else (0.0, UNBOUNDED)
        return Interval(found.value * ratio, low, high)

    return expected


make_callable(__name__)
