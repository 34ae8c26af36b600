"""Measure speculative decoding on the workload's own requests, by draft length and number of concurrent users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from powerband import engines
from powerband.core.engine import Lever
from powerband.core.study import ENGINE, SpeculationResult
from powerband.core.workload import Workload
from powerband.launchers import local
from powerband.store.journal import Journal
from powerband.tune.search_space import SearchSpace
from powerband.tune.trial_runner import TrialRunner

USERS = (1, 2, 4, 8)
_REQUESTS_PER_USER = 12  # minimum
_MIN_GAIN = 1.02  # a smaller speedup does not pay for the memory and the quality checks
_BY_BATCH = "ngram-by-batch"
_MAX_SEQUENCES = 256  # where the schedule ends

Schedule = tuple[tuple[int, int, int], ...]  # first and last number of concurrent sequences, and their draft length


def measurable(workload: Workload) -> bool:
    """Return whether acceptance on this workload is realistic: real prompts, and answers that end naturally."""
    return workload.dataset is not None and workload.ending == "natural"


async def measure(runner: TrialRunner) -> tuple[SearchSpace, tuple[SpeculationResult, ...]]:
    """Return the space without the draft lengths that are never the fastest, and all results."""
    journal = Journal(runner.folder / "speculation.jsonl")
    found = [SpeculationResult.model_validate(note) for note in journal.read()]
    space = runner.space
    for engine, levers in runner.space.by_engine.items():
        for lever in (one for one in levers if one.drafts):
            for setting in lever.settings:
                if not any((one.engine, one.setting) == (engine, setting) for one in found):
                    fresh = await _measure_setting(runner, engine, lever, setting)
                    found += fresh
                    for one in fresh:
                        journal.add(one.model_dump(mode="json"))
            mine = [one for one in found if one.engine == engine]
            space = space.with_lever(engine, worthwhile(lever, mine))
    return space, tuple(found)


async def _measure_setting(runner: TrialRunner, engine: str, lever: Lever, setting: str) -> list[SpeculationResult]:
    """Measure one setting, with every other lever at its default."""
    settings = runner.space.defaults(engine) | {ENGINE: engine, lever.name: setting}
    folder = runner.folder / f"speculation-{engine}-{list(lever.settings).index(setting)}"
    folder.mkdir(exist_ok=True)
    prepared = local.prepare(await runner.deployment(settings))
    chosen = prepared.engine.settings_of(prepared.deployment, model=prepared.model, host=prepared.host)
    runner.report(f"measure {engine} with {lever.name}={setting}")
    found = []
    async with local.launch(prepared, directory=folder) as replica:
        for users in USERS:
            requests = _REQUESTS_PER_USER * max(2, users)
            level = await runner.run_closed_loop(replica, prepared, folder, users=users, requests=requests)
            found.append(
                SpeculationResult(
                    engine=engine,
                    setting=setting,
                    drafts=chosen.drafted,
                    users=users,
                    tokens_per_s=level.output_tokens_per_s,
                    accepted=level.engine.get("spec_accepted_share"),
                )
            )
    return found


def worthwhile(lever: Lever, found: Iterable[SpeculationResult]) -> Lever:
    """Return the lever with the settings that are fastest for some number of users.

    Where that differs by users and the engine can switch by batch size, a setting with such a schedule is added.
    """
    rows = list(found)
    chosen = best_by_users(rows)
    names = {one.drafts: one.setting for one in rows}
    settings = {
        name: lever.settings[name] for name in [names[0], *(names[count] for count in chosen.values() if count)]
    }
    engine = engines.get(rows[0].engine)
    differs = len({*chosen.values()}) > 1
    by_batch = engine.drafts_by_batch(schedule(chosen, max_sequences=_MAX_SEQUENCES)) if differs else None
    return lever.model_copy(update={"settings": settings | ({_BY_BATCH: by_batch} if by_batch else {})})


def best_by_users(found: Iterable[SpeculationResult]) -> dict[int, int]:
    """Return the fastest draft length for each number of users; 0 where speculation gains too little."""
    by_users: dict[int, dict[int, float]] = {}
    for one in found:
        by_users.setdefault(one.users, {})[one.drafts] = one.tokens_per_s
    chosen = {}
    for users, speeds in sorted(by_users.items()):
        drafts = max(speeds, key=lambda count: speeds[count])
        chosen[users] = drafts if speeds[drafts] > _MIN_GAIN * speeds[0] else 0
    return chosen


def schedule(chosen: Mapping[int, int], *, max_sequences: int) -> Schedule:
    """Return the draft length by batch size; each choice applies up to half way to the next measured size."""
    sizes = sorted(chosen)
    edges = [0, *((low + high) // 2 for low, high in pairwise(sizes)), max(max_sequences, sizes[-1])]
    rows: list[tuple[int, int, int]] = []
    for (low, high), size in zip(pairwise(edges), sizes, strict=True):
        if rows and rows[-1][2] == chosen[size]:
            rows[-1] = (rows[-1][0], high, chosen[size])
        else:
            rows.append((low + 1, high, chosen[size]))
    return tuple(rows)
