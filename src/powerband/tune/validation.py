"""Validate the best trials against the engines' defaults, in interleaved runs on held-out requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from powerband.bench.profiles import LATENCY_STEEPNESS, log_excess, max_rate, meets_slo, sustains
from powerband.core.measurement import Level, Measurement
from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.statistics import Interval
from powerband.core.study import ENGINE, Settings, Study, Trial, rate_of, render_settings
from powerband.core.units import about_duration
from powerband.errors import DeploymentRefused, EngineError, InvalidMeasurement, RequirementNotMet
from powerband.store.journal import Journal
from powerband.tune import paired_comparison, recipe
from powerband.tune.budget import MAX_ROUNDS, ROUNDS
from powerband.tune.recipe import ConfirmedRate
from powerband.tune.search_space import key
from powerband.tune.trial_runner import HELD_OUT_SEED, TrialRunner, label

VALIDATION, ABLATION = "validation", "ablation"  # phases, and the names of their journals
_FINALISTS = 2
_VALIDATION_SHARE = 0.6  # of the remaining time; the rest confirms the rate and runs the ablation
# Rates to confirm, as shares of the max rate: the first, the lowest, and the largest step between two of them.
_FIRST_SHARE, _LEAST_SHARE, _SHARE_STEP = 0.85, 0.05, 0.85
_TRIES_WITH_MARGIN = 4  # rates that are tried for half of the error budget, once one meets the SLO
_ERROR_BUDGET_SHARE = 0.5  # of the SLO's error budget that a confirmed rate may use


@dataclass(frozen=True)
class Contender:
    """A deployment to measure, and the rate where its first climb starts."""

    name: str
    settings: Settings
    start_per_s: float | None
    why: str = ""  # why it was not measured
    devices: int = 1


@dataclass(frozen=True)
class Validated:
    """What a validation found."""

    winner: Contender
    summary: str
    confirmed: ConfirmedRate
    baselines: tuple[BaselineComparison, ...]
    ablation: tuple[BaselineComparison, ...]


async def validate(runner: TrialRunner, study: Study, *, budget_s: float) -> Recipe:
    """Return the recipe of the configuration that wins the validation."""
    found = await compare(runner, study.trials, budget_s=budget_s)
    return await asyncio.to_thread(  # the digest of large weights takes minutes
        recipe.build_recipe,
        runner,
        study,
        found.confirmed,
        settings=found.winner.settings,
        summary=found.summary,
        baselines=found.baselines,
        ablation=found.ablation,
    )


async def compare(runner: TrialRunner, trials: Sequence[Trial], *, budget_s: float) -> Validated:
    """Compare finalists with defaults, choose a winner or call a tie, confirm its rate, and run the ablation."""
    ends = runner.now() + budget_s - runner.elapsed_s(trials)
    two = ends - runner.now() > runner.durations.validation(finalists=2)
    finalists = await _finalists(runner, trials, _FINALISTS if two else 1)
    defaults = _defaults(runner, trials)
    able = {key(one.settings): one for one in (*finalists, *defaults) if one.start_per_s}
    rates = await measure_interleaved(runner, VALIDATION, list(able.values()), ROUNDS)
    leaders = _leaders(rates, finalists, defaults)
    if len(leaders) > 1:
        more = _further_rounds(runner, len(leaders), ends - runner.now())
        rates |= await measure_interleaved(runner, VALIDATION, leaders, ROUNDS + more)
    defaults = _with_failures(runner, VALIDATION, defaults)
    winner, summary = await _choose_winner(runner, rates, leaders, level=1 - 0.05 / len(finalists))
    baselines = [_compare(rates, winner.name, one) for one in defaults if one.name != winner.name]
    max_per_s = winner.devices * paired_comparison.geometric_mean(rates[winner.name])
    confirmed = await _confirm_rate(runner, winner, max_per_s)
    ablations = _ablations(runner, winner)
    ablation_rates: paired_comparison.MaxRates = {}
    needed_s = runner.durations.waves(ROUNDS * (len(ablations) + 1)) * fmean(_durations_s(runner) or [0.0])
    if ablations and ends - runner.now() >= needed_s:
        ablation_rates = await measure_interleaved(runner, ABLATION, [winner, *ablations], ROUNDS)
        ablations = _with_failures(runner, ABLATION, ablations)
    elif ablations:
        runner.report(
            f"no time left for the ablation, which takes about {about_duration(needed_s)}: "
            "rerun with --resume and a larger --budget"
        )
    return Validated(
        winner=winner,
        summary="; ".join((summary, *(exclusion_reason(one) for one in defaults if one.name not in rates))),
        confirmed=confirmed,
        baselines=tuple(baselines),
        ablation=tuple(_compare(ablation_rates, winner.name, one) for one in ablations if ablation_rates),
    )


def _further_rounds(runner: TrialRunner, contenders: int, remaining_s: float) -> int:
    """Return how many rounds fit into the validation's share of the remaining time."""
    climb_s, more = fmean(_durations_s(runner)), MAX_ROUNDS - ROUNDS
    fitting = [n for n in range(more + 1)
               if runner.durations.waves(n * contenders) * climb_s <= _VALIDATION_SHARE * remaining_s]  # fmt: skip
    return max(fitting, default=0)


def exclusion_reason(one: Contender) -> str:
    """Return why a contender has no max rate: it failed, or it misses the SLO at every rate."""
    return f"{one.name} was not measured: {one.why}" if one.why else f"{one.name} meets the SLO at no request rate"


def contender_of(runner: TrialRunner, trial: Trial) -> Contender:
    """Return the contender with the settings of a trial."""
    name = render_settings(trial.settings, runner.space.all_defaults)
    why = trial.reason if trial.outcome in ("below the floor", "failed", "inconclusive", "ruled out") else ""
    return Contender(name, trial.settings, rate_of(trial) or None, why, trial.devices)


def _defaults(runner: TrialRunner, trials: Sequence[Trial]) -> list[Contender]:
    """Return the engines' defaults. One that its screen puts clearly below another one is not measured again.

    The rounds of a slow deployment take longest: an engine of a fifth of the rate would take most of the validation.
    """
    found = [one for one in trials if not runner.space.non_default(one.settings)]
    least = max((one.estimate_per_s.low / one.devices for one in found if one.estimate_per_s), default=0.0)
    contenders = []
    for trial in found:
        one, estimate = contender_of(runner, trial), trial.estimate_per_s
        if estimate and not one.why and estimate.high / trial.devices < least:
            why = f"its screen estimates at most {estimate.high:.3g} req/s, which is less than another engine's default"
            one = replace(one, start_per_s=None, why=why)
        contenders.append(one)
    return contenders


async def _finalists(runner: TrialRunner, trials: Sequence[Trial], count: int) -> list[Contender]:
    """Return the best trials that pass the quality check."""
    found: list[Contender] = []
    refused = []
    # The defaults come last: they need no check, and are there if everything faster degrades the answers.
    defaults = [one for one in trials if rate_of(one) and not runner.space.non_default(one.settings)]
    feasible = sorted((one for one in trials if one.outcome == "feasible"), key=lambda one: -one.value)
    for trial in (*feasible, *sorted(defaults, key=lambda one: -one.value)):
        if len(found) < (count if trial in feasible else 1):
            one = contender_of(runner, trial)
            checked = {"passed": True} if trial.passed else await runner.quality_check(one.settings)
            if checked["passed"]:
                found.append(one)
            else:
                refused.append(f"{one.name}: {checked['reason']}")
    if not found:
        raise RequirementNotMet(
            f"no deployment that meets the SLO passes the quality check: {'; '.join(refused)}",
            hint="allow more schemes with --scheme, or choose another --quality floor",
        )
    return found


async def measure_interleaved(
    runner: TrialRunner, phase: str, contenders: Sequence[Contender], rounds: int
) -> dict[str, list[float]]:
    """Return the max rate per device of each contender in each round, without those that fail or never meet the SLO.

    As many deployments run at a time as the study's devices allow, in interleaved order. Rounds that are in the phase's
    journal are not repeated.
    """
    journal = Journal(runner.folder / f"{phase}.jsonl")
    done = {(entry["round"], entry["name"]): entry["max_rate_per_s"] for entry in journal.read()}
    by_name = {one.name: one for one in contenders}
    if len(contenders) < 2:
        rounds = 1
    order = list(paired_comparison.interleave(list(by_name), rounds))
    turns = asyncio.Semaphore(runner.parallel_trials if runner.pool else 1)

    async def measure(number: int, name: str) -> None:
        async with turns, runner.holding(by_name[name].devices):
            rates = [done[key] for one in range(rounds) if (key := (one, name)) in done]
            if (number, name) in done or None in rates:
                return
            start = paired_comparison.geometric_mean(rates) if rates else by_name[name].start_per_s
            title = f"{phase}, round {number + 1} of {rounds}"
            runner.report(f"{title}: {name}")
            label.set(f"{title}, {name}")
            folder = runner.folder / f"{phase}-{number + 1}-{list(by_name).index(name) + 1}"
            settings, seed = by_name[name].settings, runner.workload.seed + HELD_OUT_SEED + number
            entry: dict[str, Any] = {"round": number, "name": name, "settings": settings}
            began = runner.now()
            try:
                levels = (await measure_max_rate(runner, settings, folder, start, seed=seed)).levels
                entry |= {"max_rate_per_s": max_rate(levels), "levels": [_level_data(level) for level in levels]}
            except (EngineError, DeploymentRefused) as error:
                entry |= {"max_rate_per_s": None, "levels": [], "why": error.message.splitlines()[0]}
            journal.add(entry | {"seconds": round(runner.now() - began, 1)})
            done[number, name] = entry["max_rate_per_s"]

    tasks = [asyncio.ensure_future(measure(*turn)) for turn in order]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rates = {name: [done[number, name] for number in range(rounds) if (number, name) in done] for name in by_name}
    return {
        name: [rate / by_name[name].devices for rate in found] for name, found in rates.items() if found and all(found)
    }


def _durations_s(runner: TrialRunner) -> list[float]:
    """Return the duration of each climb of the validation."""
    return [entry["seconds"] for entry in Journal(runner.folder / f"{VALIDATION}.jsonl").read()]


def _with_failures(runner: TrialRunner, phase: str, contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders, with the reason of those that failed in a phase."""
    entries = Journal(runner.folder / f"{phase}.jsonl").read()
    reasons = {entry["name"]: entry["why"] for entry in entries if "why" in entry}
    return [replace(one, why=reasons.get(one.name, one.why)) for one in contenders]


def _level_data(level: Level) -> dict[str, Any]:
    """Return what a chart needs of a level."""
    shown = {f"{one.metric} {one.percentile}": one.value_s for one in level.slo_checks}
    return {"rate_per_s": level.rate_per_s or level.achieved_per_s, "meets_slo": meets_slo(level), **shown}


async def measure_max_rate(
    runner: TrialRunner, settings: Settings, folder: Path, start_per_s: float | None, *, seed: int
) -> Measurement:
    """Start the deployment and find its max rate, with one retry."""
    folder.mkdir(exist_ok=True)
    prepared = runner.prepare(await runner.deployment(settings))

    async def once() -> Measurement:
        async with runner.launch(prepared, folder) as replica:
            return await runner.climb(replica, prepared, folder, start_per_s=start_per_s, seed=seed)

    with contextlib.suppress(EngineError, InvalidMeasurement):
        found = await once()
        if max_rate(found.levels):
            return found
    return await once()


def _leaders(
    rates: paired_comparison.MaxRates, finalists: Sequence[Contender], defaults: Sequence[Contender]
) -> tuple[Contender, ...]:
    """Return the best finalist and the best default, which share the remaining rounds.

    There is one alone if both are the same, or if no default meets the SLO.
    """

    def best(some: Sequence[Contender]) -> list[Contender]:
        able = sorted(
            (one for one in some if one.name in rates),
            key=lambda one: paired_comparison.geometric_mean(rates[one.name]),
        )
        return able[-1:]

    if not best(finalists):
        raise InvalidMeasurement(
            "no finalist met the SLO on held-out requests, though it did in the search",
            hint="stop other work on this machine, then rerun with --resume",
        )
    return tuple({one.name: one for one in (*best(finalists), *best(defaults))}.values())


async def _choose_winner(
    runner: TrialRunner, rates: paired_comparison.MaxRates, leaders: Sequence[Contender], *, level: float
) -> tuple[Contender, str]:
    """Return the winner and the summary: the default wins unless the finalist is better beyond the noise."""
    best = leaders[0]
    if len(leaders) == 1 and runner.space.non_default(best.settings):
        return best, f"{best.name} meets the SLO and the quality floor"
    if len(leaders) == 1:
        return best, f"no tried configuration is better than {best.name}"
    rival = leaders[1]
    ratio = paired_comparison.ratio(rates, best.name, rival.name, level=level)
    times = f"{ratio.value:.2f} times [{ratio.low:.2f}, {ratio.high:.2f}]"
    gain = "the rate" if best.devices == rival.devices else "the requests per dollar"
    if ratio.low > 1:
        return best, f"{best.name} sustains {times} {gain} of {rival.name}"
    if (await runner.quality_check(rival.settings))["passed"]:
        return rival, f"no configuration is reliably better than {rival.name}: the best sustains {times} its rate"
    return best, f"{best.name} sustains {times} {gain} of {rival.name}, which is below the quality floor"


def _compare(rates: paired_comparison.MaxRates, winner: str, one: Contender) -> BaselineComparison:
    ratio: Interval | None = None
    if one.name in rates and winner in rates:
        ratio = paired_comparison.ratio(rates, winner, one.name)
    mean = one.devices * paired_comparison.geometric_mean(rates[one.name]) if one.name in rates else None
    why = one.why if mean is None else ""  # a failure in a later round leaves the earlier rounds
    return BaselineComparison(name=one.name, settings=one.settings, max_rate_per_s=mean, why=why, ratio=ratio)


def _ablations(runner: TrialRunner, winner: Contender) -> list[Contender]:
    """Return the winner with one lever at its default, for each non-default lever."""
    default = runner.space.defaults(winner.settings[ENGINE])
    return [
        Contender(
            f"{lever}={default[lever]} instead of {setting}",
            winner.settings | {lever: default[lever]},
            winner.start_per_s,
            devices=runner.devices(winner.settings | {lever: default[lever]}),
        )
        for lever, setting in runner.space.non_default(winner.settings).items()
    ]


def _has_margin(level: Level) -> bool:
    """Return whether a level uses no more than its share of the SLO's error budget."""
    return all(
        1 - one.share.value <= _ERROR_BUDGET_SHARE * (1 - float(one.percentile[1:]) / 100) for one in level.slo_checks
    )


def _lower(share: float, level: Level) -> float:
    """Return the next share of the max rate: where the latencies of a level say that half of the budget is left."""
    over = log_excess(level, budget_share=_ERROR_BUDGET_SHARE)
    return share * min(_SHARE_STEP, math.exp(-over / LATENCY_STEEPNESS))


async def _confirm_rate(runner: TrialRunner, winner: Contender, max_rate_per_s: float) -> ConfirmedRate:
    """Lower the rate below the max rate until it meets the SLO, if possible with half of the error budget left."""
    prepared, confirmed = runner.prepare(await runner.deployment(winner.settings)), None
    folder = runner.folder / "confirm"
    folder.mkdir(exist_ok=True)
    async with runner.launch(prepared, folder) as replica:
        share, number = _FIRST_SHARE, 0
        while share >= _LEAST_SHARE and not (confirmed and number >= _TRIES_WITH_MARGIN):
            rate = share * max_rate_per_s
            runner.report(f"confirm {rate:.3g} req/s")
            seed = runner.workload.seed + HELD_OUT_SEED + 500 + 10 * number
            attempt = runner.folder / f"confirm-{number + 1}"
            attempt.mkdir(exist_ok=True)
            level = await runner.run_fixed_rate(replica, prepared, attempt, rate_per_s=rate, seed=seed)
            if sustains(level, rate):
                confirmed = ConfirmedRate(prepared, rate, level, replica.memory_bytes())
                if _has_margin(level):
                    break
            share, number = _lower(share, level), number + 1
    if confirmed:
        return confirmed
    raise InvalidMeasurement(
        f"{winner.name} sustained no rate down to {rate:.3g} req/s ({level.verdict}); its max rate was "
        f"{max_rate_per_s:.3g} req/s",
        hint="stop other work on this machine, then rerun with --resume",
    )
