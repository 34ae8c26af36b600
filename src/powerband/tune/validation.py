"""Validate the best trials against the engines' defaults, in interleaved runs on held-out requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from powerband.bench.profiles import max_rate, meets_slo, sustains
from powerband.core.measurement import Level, Measurement
from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.statistics import Interval
from powerband.core.study import ENGINE, Settings, Study, Trial, render_settings, typical_trial_s
from powerband.errors import DeploymentRefused, EngineError, InvalidMeasurement, RequirementNotMet
from powerband.launchers import local
from powerband.store.journal import Journal
from powerband.tune import paired_comparison, recipe
from powerband.tune.recipe import ConfirmedRate
from powerband.tune.search_space import key
from powerband.tune.trial_runner import HELD_OUT_SEED, TrialRunner

VALIDATION, ABLATION = "validation", "ablation"  # phases, and the names of their journals
_FINALISTS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 3, 9
_VALIDATION_SHARE = 0.6  # of the remaining time; the rest confirms the rate and runs the ablation
_RATE_STEP = 0.85  # each rate to confirm is this fraction of the last one, the first of the max rate
_MAX_CONFIRMATIONS = 4
_ERROR_BUDGET_SHARE = 0.5  # of the SLO's error budget that a confirmed rate may use


@dataclass(frozen=True)
class Contender:
    """A deployment to measure, and the rate where its first climb starts."""

    name: str
    settings: Settings
    start_per_s: float | None
    why: str = ""  # why it was not measured


async def validate(runner: TrialRunner, study: Study, *, budget_s: float) -> Recipe:
    """Compare finalists with defaults, choose a winner or call a tie, confirm its rate, and run the ablation."""
    trial_s, began = typical_trial_s(study.trials), time.monotonic()
    remaining_s = budget_s - runner.elapsed_s(study.trials)
    finalists = await _finalists(runner, study, _FINALISTS if remaining_s > 2 * min_duration_s(trial_s) else 1)
    defaults = [contender_of(runner, one) for one in study.trials if not runner.space.non_default(one.settings)]
    able = {key(one.settings): one for one in (*finalists, *defaults) if one.start_per_s}
    remaining_s -= time.monotonic() - began  # the full quality checks
    rates = await measure_interleaved(runner, VALIDATION, list(able.values()), _MIN_ROUNDS)
    leaders = _leaders(rates, finalists, defaults)
    if len(leaders) > 1:
        durations_s = _durations_s(runner, trial_s, rounds=_MIN_ROUNDS)
        more = max(0, int((_VALIDATION_SHARE * remaining_s - sum(durations_s)) / (len(leaders) * fmean(durations_s))))
        rates |= await measure_interleaved(runner, VALIDATION, leaders, min(_MIN_ROUNDS + more, _MAX_ROUNDS))
    defaults = _with_failures(runner, VALIDATION, defaults)
    winner, summary = await _choose_winner(runner, rates, leaders, level=1 - 0.05 / len(finalists))
    baselines = [_compare(rates, winner.name, one) for one in defaults if one.name != winner.name]
    began = time.monotonic()
    confirmed = await _confirm_rate(runner, winner, paired_comparison.geometric_mean(rates[winner.name]))
    durations_s = _durations_s(runner, trial_s)
    remaining_s -= sum(durations_s) + time.monotonic() - began
    ablations = _ablations(runner, winner)
    ablation_rates: paired_comparison.MaxRates = {}
    if ablations and remaining_s >= _MIN_ROUNDS * (len(ablations) + 1) * fmean(durations_s):
        ablation_rates = await measure_interleaved(runner, ABLATION, [winner, *ablations], _MIN_ROUNDS)
        ablations = _with_failures(runner, ABLATION, ablations)
    elif ablations:
        runner.report("no time left for the ablation: rerun with --resume and a larger --budget")
    return recipe.build_recipe(
        runner,
        study,
        confirmed,
        settings=winner.settings,
        summary="; ".join((summary, *(exclusion_reason(one) for one in defaults if one.name not in rates))),
        baselines=tuple(baselines),
        ablation=tuple(_compare(ablation_rates, winner.name, one) for one in ablations if ablation_rates),
    )


def exclusion_reason(one: Contender) -> str:
    """Return why a contender has no max rate: it failed, or it misses the SLO at every rate."""
    return f"{one.name} was not measured: {one.why}" if one.why else f"{one.name} meets the SLO at no request rate"


def contender_of(runner: TrialRunner, trial: Trial) -> Contender:
    """Return the contender with the settings of a trial."""
    name = render_settings(trial.settings, runner.space.all_defaults)
    why = "" if trial.outcome in ("feasible", "too slow") else trial.reason
    return Contender(name, trial.settings, trial.max_rate_per_s, why)


async def _finalists(runner: TrialRunner, study: Study, count: int) -> list[Contender]:
    """Return the best trials that pass the full quality check."""
    found: list[Contender] = []
    refused = []
    for trial in sorted(study.trials, key=lambda one: -one.value):
        if trial.outcome == "feasible" and len(found) < count:
            one = contender_of(runner, trial)
            if failure := await runner.full_quality_check(one.settings):
                refused.append(f"{one.name}: {failure}")
            else:
                found.append(one)
    if not found:
        raise RequirementNotMet(
            f"no deployment that meets the SLO passes the full quality check: {'; '.join(refused)}",
            hint="allow more schemes with --scheme, or choose another --quality floor",
        )
    return found


def min_duration_s(trial_s: float) -> float:
    """Return the duration of the shortest validation: one finalist, one engine's defaults, and a rate to confirm."""
    return (2 * _MIN_ROUNDS + 1) * trial_s


async def measure_interleaved(
    runner: TrialRunner, phase: str, contenders: Sequence[Contender], rounds: int
) -> dict[str, list[float]]:
    """Return the max rate of each contender in each round, without those that fail or never meet the SLO.

    Rounds that are in the phase's journal are not repeated.
    """
    journal = Journal(runner.folder / f"{phase}.jsonl")
    done = {(entry["round"], entry["name"]): entry["max_rate_per_s"] for entry in journal.read()}
    rates: dict[str, list[float | None]] = {one.name: [] for one in contenders}
    by_name = {one.name: one for one in contenders}
    if len(contenders) < 2:
        rounds = 1
    for number, name in paired_comparison.interleave(list(by_name), rounds):
        if (number, name) not in done:
            if None in rates[name]:
                continue
            so_far = [rate for rate in rates[name] if rate]
            start = paired_comparison.geometric_mean(so_far) if so_far else by_name[name].start_per_s
            runner.report(f"{phase}, round {number + 1} of {rounds}: {name}")
            folder = runner.folder / f"{phase}-{number + 1}-{list(by_name).index(name) + 1}"
            settings, seed = by_name[name].settings, runner.workload.seed + HELD_OUT_SEED + number
            entry: dict[str, Any] = {"round": number, "name": name, "settings": settings}
            began = time.monotonic()
            try:
                levels = (await measure_max_rate(runner, settings, folder, start, seed=seed)).levels
                entry |= {"max_rate_per_s": max_rate(levels), "levels": [_level_data(level) for level in levels]}
            except (EngineError, DeploymentRefused) as error:
                entry |= {"max_rate_per_s": None, "levels": [], "why": error.message.splitlines()[0]}
            journal.add(entry | {"seconds": round(time.monotonic() - began, 1)})
            done[number, name] = entry["max_rate_per_s"]
        rates[name].append(done[number, name])
    return {name: [rate for rate in found if rate] for name, found in rates.items() if all(found)}


def _durations_s(runner: TrialRunner, trial_s: float, *, rounds: int = _MAX_ROUNDS) -> list[float]:
    """Return the duration of each climb of the first validation rounds; entries of old versions have none."""
    entries = Journal(runner.folder / f"{VALIDATION}.jsonl").read()
    return [entry.get("seconds", trial_s) for entry in entries if entry["round"] < rounds]


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
    prepared = local.prepare(await runner.deployment(settings))

    async def once() -> Measurement:
        async with local.launch(prepared, directory=folder) as replica:
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
    if ratio.low > 1:
        return best, f"{best.name} sustains {times} the rate of {rival.name}"
    if not await runner.full_quality_check(rival.settings):
        return rival, f"no configuration is reliably better than {rival.name}: the best sustains {times} its rate"
    return best, f"{best.name} sustains {times} the rate of {rival.name}, which is below the quality floor"


def _compare(rates: paired_comparison.MaxRates, winner: str, one: Contender) -> BaselineComparison:
    ratio: Interval | None = None
    if one.name in rates and winner in rates:
        ratio = paired_comparison.ratio(rates, winner, one.name)
    mean = paired_comparison.geometric_mean(rates[one.name]) if one.name in rates else None
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
        )
        for lever, setting in runner.space.non_default(winner.settings).items()
    ]


def _has_margin(level: Level) -> bool:
    """Return whether a level uses no more than its share of the SLO's error budget."""
    return all(
        1 - one.share.value <= _ERROR_BUDGET_SHARE * (1 - float(one.percentile[1:]) / 100) for one in level.slo_checks
    )


async def _confirm_rate(runner: TrialRunner, winner: Contender, max_rate_per_s: float) -> ConfirmedRate:
    """Lower the rate below the max rate until it meets the SLO with half of the error budget left."""
    prepared = local.prepare(await runner.deployment(winner.settings))
    rate, confirmed = max_rate_per_s, None
    for number in range(_MAX_CONFIRMATIONS):
        rate *= _RATE_STEP
        runner.report(f"confirm {rate:.3g} req/s")
        folder = runner.folder / f"confirm-{number + 1}"
        folder.mkdir(exist_ok=True)
        async with local.launch(prepared, directory=folder) as replica:
            seed = runner.workload.seed + HELD_OUT_SEED + 500 + 10 * number
            level = await runner.run_fixed_rate(replica, prepared, folder, rate_per_s=rate, seed=seed)
            memory = replica.process.memory_bytes() if replica.process else None
        sustained = sustains(level, rate)
        confirmed = ConfirmedRate(prepared, rate, level, memory) if sustained else confirmed
        if sustained and _has_margin(level):
            break
    if confirmed:
        return confirmed
    raise InvalidMeasurement(
        f"{winner.name} did not sustain {rate:.3g} req/s; its max rate was {max_rate_per_s:.3g} req/s",
        hint="stop other work on this machine, then rerun with --resume",
    )
