"""Prove the answer: the finalists and the engines' defaults in turns, on requests that the search never saw."""

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
from powerband.core.study import Settings, Study, Trial, usual_s
from powerband.errors import DeploymentRefused, EngineError, InvalidMeasurement, PromiseBroken
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.store.journal import Journal
from powerband.tune import paired_comparison, recipe
from powerband.tune.search_space import ENGINE, key
from powerband.tune.trial_runner import HELD_OUT_SEED, TrialRunner

_FINALISTS = 2
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9
_SHARE = 0.6  # of the time that is left is for the finals
_SPARE = 0.85  # of the knee is promised
_TRIES = 4
_LATE = 0.5  # of those that may be late may be late when a rate is promised


@dataclass(frozen=True)
class Contender:
    """Who is measured, and where its first climb begins."""

    name: str
    settings: Settings
    start_per_s: float | None
    why: str = ""  # it was not measured


async def prove(rig: TrialRunner, study: Study, *, budget_s: float) -> Recipe:
    """Measure finalists against defaults, crown one or call it a tie, promise a rate, see what each lever brought."""
    trial_s, left_s, began = usual_s(study.trials), budget_s - rig.gone_s(study.trials), time.monotonic()
    finalists = await _finalists(rig, study, _FINALISTS if left_s > 2 * least_s(trial_s) else 1)
    defaults = [contender(rig, one) for one in study.trials if not rig.levers.turned(one.settings)]
    able = {key(one.settings): one for one in (*finalists, *defaults) if one.start_per_s}
    left_s -= time.monotonic() - began  # which the gate took
    knees = await contest_of(rig, "finals", list(able.values()), _LEAST_ROUNDS)
    foremost = _foremost(knees, finalists, defaults)
    if len(foremost) > 1:
        took_s = _took_s(rig, trial_s, rounds=_LEAST_ROUNDS)
        more = max(0, int((_SHARE * left_s - sum(took_s)) / (len(foremost) * fmean(took_s))))
        knees |= await contest_of(rig, "finals", foremost, min(_LEAST_ROUNDS + more, _MOST_ROUNDS))
    defaults = _failed(rig, "finals", defaults)
    winner, says = await _crown(rig, knees, foremost, level=1 - 0.05 / len(finalists))
    against = [_against(knees, winner.name, one) for one in defaults if one.name != winner.name]
    began = time.monotonic()
    promised = await _promise(rig, winner, paired_comparison.mean(knees[winner.name]))
    took_s = _took_s(rig, trial_s)
    left_s -= sum(took_s) + time.monotonic() - began
    without = _without(rig, winner)
    brought: paired_comparison.Knees = {}
    if without and left_s >= _LEAST_ROUNDS * (len(without) + 1) * fmean(took_s):
        brought = await contest_of(rig, "levers", [winner, *without], _LEAST_ROUNDS)
        without = _failed(rig, "levers", without)
    elif without:
        rig.say("the time does not reach to see what each lever brings: --resume with a larger --budget")
    return recipe.written(
        rig,
        study,
        promised,
        settings=winner.settings,
        summary="; ".join((says, *(absent(one) for one in defaults if one.name not in knees))),
        baselines=tuple(against),
        ablation=tuple(_against(brought, winner.name, one) for one in without if brought),
    )


def absent(one: Contender) -> str:
    """Return why one is not in the contest: what failed is not known to be slow."""
    return f"{one.name} was not measured: {one.why}" if one.why else f"{one.name} keeps the SLO at no rate"


def contender(rig: TrialRunner, trial: Trial) -> Contender:
    """Return who a trial was of."""
    turned = ", ".join(f"{lever} {setting}" for lever, setting in rig.levers.turned(trial.settings).items())
    name = f"{trial.settings[ENGINE]} {f'with {turned}' if turned else 'as it comes'}"
    why = "" if trial.outcome in ("feasible", "too slow") else trial.reason
    return Contender(name, trial.settings, trial.max_rate_per_s, why)


async def _finalists(rig: TrialRunner, study: Study, most: int) -> list[Contender]:
    """Return the best trials that the whole gate lets pass."""
    found: list[Contender] = []
    refused = []
    for trial in sorted(study.trials, key=lambda one: -one.value):
        if trial.outcome == "feasible" and len(found) < most:
            one = contender(rig, trial)
            if objection := await rig.objection(one.settings):
                refused.append(f"{one.name}: {objection}")
            else:
                found.append(one)
    if not found:
        raise PromiseBroken(
            f"no deployment that keeps the SLO was let pass by the gate: {'; '.join(refused)}",
            hint="name more --scheme, or take another floor",
        )
    return found


def least_s(trial_s: float) -> float:
    """Return how long a proof takes that has a finalist, one engine's defaults, and a promise to hold."""
    return (2 * _LEAST_ROUNDS + 1) * trial_s


async def contest_of(
    rig: TrialRunner, phase: str, contenders: Sequence[Contender], rounds: int
) -> dict[str, list[float]]:
    """Measure them in turns; who fails, or keeps the SLO at no rate, is not among the results.

    What was noted is not repeated.
    """
    journal = Journal(rig.folder / f"{phase}.jsonl")
    noted = {(note["round"], note["name"]): note["max_rate_per_s"] for note in journal.read()}
    knees: dict[str, list[float | None]] = {one.name: [] for one in contenders}
    by_name = {one.name: one for one in contenders}
    if len(contenders) < 2:
        rounds = 1
    for number, name in paired_comparison.turns(list(by_name), rounds):
        if (number, name) not in noted:
            if None in knees[name]:
                continue
            so_far = [found for found in knees[name] if found]
            start = paired_comparison.mean(so_far) if so_far else by_name[name].start_per_s
            rig.say(f"{phase}, round {number + 1} of {rounds}: {name}")
            folder = rig.folder / f"{phase}-{number + 1}-{list(by_name).index(name) + 1}"
            settings, seed = by_name[name].settings, rig.workload.seed + HELD_OUT_SEED + number
            note: dict[str, Any] = {"round": number, "name": name, "settings": settings}
            began = time.monotonic()
            try:
                found = (await block(rig, settings, folder, start, seed=seed)).levels
                note |= {"max_rate_per_s": max_rate(found), "levels": [_drawn(level) for level in found]}
            except (EngineError, DeploymentRefused) as error:
                note |= {"max_rate_per_s": None, "levels": [], "why": error.message.splitlines()[0]}
            journal.add(note | {"seconds": round(time.monotonic() - began, 1)})
            noted[number, name] = note["max_rate_per_s"]
        knees[name].append(noted[number, name])
    return {name: [rate for rate in found if rate] for name, found in knees.items() if all(found)}


def _took_s(rig: TrialRunner, trial_s: float, *, rounds: int = _MOST_ROUNDS) -> list[float]:
    """Return how long each climb of the finals' first rounds took; an older version did not note it."""
    notes = Journal(rig.folder / "finals.jsonl").read()
    return [note.get("seconds", trial_s) for note in notes if note["round"] < rounds]


def _failed(rig: TrialRunner, phase: str, contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders, and of those that failed in a contest why."""
    noted = {note["name"]: note["why"] for note in Journal(rig.folder / f"{phase}.jsonl").read() if "why" in note}
    return [replace(one, why=noted.get(one.name, one.why)) for one in contenders]


def _drawn(level: Level) -> dict[str, Any]:
    """Return what a chart needs of a level."""
    shown = {f"{one.metric} {one.percentile}": one.value_s for one in level.slo_checks}
    return {"rate_per_s": level.rate_per_s or level.achieved_per_s, "kept": meets_slo(level), **shown}


async def block(
    rig: TrialRunner, settings: Settings, folder: Path, start_per_s: float | None, *, seed: int
) -> Measurement:
    """Start it and find its knee, twice where it does not work at once."""
    folder.mkdir(exist_ok=True)
    prepared = local.prepare(await rig.deployment(settings))

    async def once() -> Measurement:
        async with local.launch(prepared, directory=folder) as replica:
            return await rig.climb(replica, prepared, folder, start_per_s=start_per_s, seed=seed)

    with contextlib.suppress(EngineError, InvalidMeasurement):
        found = await once()
        if max_rate(found.levels):
            return found
    return await once()


def _foremost(
    knees: paired_comparison.Knees, finalists: Sequence[Contender], defaults: Sequence[Contender]
) -> tuple[Contender, ...]:
    """Return the best finalist and the better engine's defaults: the rounds that are left are between these two.

    One alone where it is both, or where no engine's defaults keep the SLO.
    """

    def best(some: Sequence[Contender]) -> list[Contender]:
        able = sorted(
            (one for one in some if one.name in knees), key=lambda one: paired_comparison.mean(knees[one.name])
        )
        return able[-1:]

    if not best(finalists):
        raise InvalidMeasurement("no finalist kept the SLO when it was measured again", hint="is the machine quiet?")
    return tuple({one.name: one for one in (*best(finalists), *best(defaults))}.values())


async def _crown(
    rig: TrialRunner, knees: paired_comparison.Knees, foremost: Sequence[Contender], *, level: float
) -> tuple[Contender, str]:
    """Return the winner, and by how much it is better than the better engine's defaults; those where it is not."""
    best = foremost[0]
    if len(foremost) == 1 and rig.levers.turned(best.settings):
        return best, f"{best.name} keeps both promises"
    if len(foremost) == 1:
        return best, f"nothing that was tried is better than {best.name}"
    rival = foremost[1]
    ratio = paired_comparison.ratio(knees, best.name, rival.name, level=level)
    told = f"{ratio.value:.2f} times [{ratio.low:.2f}, {ratio.high:.2f}]"
    if ratio.low > 1:
        return best, f"{best.name} carries {told} the load of {rival.name}"
    if not await rig.objection(rival.settings):
        return rival, f"no config is reliably better than {rival.name}: the best carries {told} its load"
    return best, f"{best.name} carries {told} the load of {rival.name}, whose answers fall below the floor"


def _against(knees: paired_comparison.Knees, winner: str, one: Contender) -> BaselineComparison:
    ratio: Interval | None = None
    if one.name in knees and winner in knees:
        ratio = paired_comparison.ratio(knees, winner, one.name)
    mean = paired_comparison.mean(knees[one.name]) if one.name in knees else None
    why = one.why if mean is None else ""  # who failed in a later round has its first ones
    return BaselineComparison(name=one.name, settings=one.settings, max_rate_per_s=mean, why=why, ratio=ratio)


def _without(rig: TrialRunner, winner: Contender) -> list[Contender]:
    """Return the winner with one lever turned back each."""
    default = rig.levers.defaults(winner.settings[ENGINE])
    return [
        Contender(
            f"{lever} {default[lever]} instead of {setting}",
            winner.settings | {lever: default[lever]},
            winner.start_per_s,
        )
        for lever, setting in rig.levers.turned(winner.settings).items()
    ]


@dataclass(frozen=True)
class Proof:
    """A rate that held on requests that nobody saw before, and what it took."""

    prepared: Prepared
    rate_per_s: float
    level: Level
    memory_bytes: int | None


def _has_room(level: Level) -> bool:
    """Tell whether half as many requests as may be late were late."""
    return all(1 - one.share.value <= _LATE * (1 - float(one.percentile[1:]) / 100) for one in level.slo_checks)


async def _promise(rig: TrialRunner, winner: Contender, max_rate_per_s: float) -> Proof:
    """Hold somewhat less than the knee, and less again until half of the error budget is left for worse days."""
    prepared = local.prepare(await rig.deployment(winner.settings))
    rate, held = max_rate_per_s, None
    for number in range(_TRIES):
        rate *= _SPARE
        rig.say(f"promise {rate:.3g}/s")
        folder = rig.folder / f"promise-{number + 1}"
        folder.mkdir(exist_ok=True)
        async with local.launch(prepared, directory=folder) as replica:
            seed = rig.workload.seed + HELD_OUT_SEED + 500 + 10 * number
            level = await rig.hold(replica, prepared, folder, rate_per_s=rate, seed=seed)
            memory = replica.process.memory_bytes() if replica.process else None
        kept = sustains(level, rate)
        held = Proof(prepared, rate, level, memory) if kept else held
        if kept and _has_room(level):
            break
    if held:
        return held
    raise InvalidMeasurement(
        f"{winner.name} did not hold {rate:.3g}/s, though it carried more before", hint="is the machine quiet?"
    )
