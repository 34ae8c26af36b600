"""Speculation, measured on what people ask: what drafts bring for each number of users who are answered at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from powerband import engines
from powerband.core.engine import Lever
from powerband.core.study import SpeculationResult
from powerband.core.workload import Workload
from powerband.launchers import local
from powerband.store.journal import Journal
from powerband.tune.search_space import ENGINE, SearchSpace
from powerband.tune.trial_runner import TrialRunner

USERS = (1, 2, 4, 8)
_REQUESTS = 12  # of each user at the least
_WORTH = 1.02  # below this gain drafts are left away: they cost memory and the gate's time
_BY_BATCH = "n-gram by batch"

Schedule = tuple[tuple[int, int, int], ...]  # from so many sequences at once, to so many, so many drafts


def telling(workload: Workload) -> bool:
    """Tell whether a workload can tell of drafts: it has people's own words, and answers end where they end."""
    return workload.dataset is not None and workload.ending == "natural"


async def measured(rig: TrialRunner) -> tuple[SearchSpace, tuple[SpeculationResult, ...]]:
    """Return the levers without drafts that lose for every number of users, and what was measured."""
    journal = Journal(rig.folder / "drafts.jsonl")
    found = [SpeculationResult.model_validate(note) for note in journal.read()]
    own = rig.levers
    for engine, held in rig.levers.by_engine.items():
        for lever in (one for one in held if one.drafts):
            for setting in lever.settings:
                if not any((one.engine, one.setting) == (engine, setting) for one in found):
                    fresh = await _drafted(rig, engine, lever, setting)
                    found += fresh
                    for one in fresh:
                        journal.add(one.model_dump(mode="json"))
            mine = [one for one in found if one.engine == engine]
            own = own.with_lever(engine, worthwhile(lever, mine))
    return own, tuple(found)


async def _drafted(rig: TrialRunner, engine: str, lever: Lever, setting: str) -> list[SpeculationResult]:
    """Measure one setting, everything else as the engine comes."""
    settings = rig.levers.defaults(engine) | {ENGINE: engine, lever.name: setting}
    folder = rig.folder / f"drafts-{engine}-{list(lever.settings).index(setting)}"
    folder.mkdir(exist_ok=True)
    prepared = local.prepare(await rig.deployment(settings))
    choice = prepared.engine.choice_of(prepared.deployment, model=prepared.model, host=prepared.host)
    rig.say(f"{engine}: what {lever.name} {setting} brings")
    found = []
    async with local.launch(prepared, directory=folder) as replica:
        for users in USERS:
            level = await rig.crowd(replica, prepared, folder, users=users, requests=_REQUESTS * max(2, users))
            found.append(
                SpeculationResult(
                    engine=engine,
                    setting=setting,
                    drafts=choice.drafted,
                    users=users,
                    tokens_per_s=level.output_tokens_per_s,
                    accepted=level.engine.get("spec_accepted_share"),
                )
            )
    return found


def worthwhile(lever: Lever, found: Iterable[SpeculationResult]) -> Lever:
    """Return the lever with those settings that are best for some number of users, and a table where one is better."""
    rows = list(found)
    chosen = best(rows)
    names = {one.drafts: one.setting for one in rows}
    settings = {
        name: lever.settings[name] for name in [names[0], *(names[count] for count in chosen.values() if count)]
    }
    engine = engines.get(rows[0].engine)
    table = engine.drafts_by_batch(schedule(chosen, most=256)) if len({*chosen.values()}) > 1 else None
    return lever.model_copy(update={"settings": settings | ({_BY_BATCH: table} if table else {})})


def best(found: Iterable[SpeculationResult]) -> dict[int, int]:
    """Return the number of drafts that writes fastest, by users; 0 where none is worth it."""
    by_users: dict[int, dict[int, float]] = {}
    for one in found:
        by_users.setdefault(one.users, {})[one.drafts] = one.tokens_per_s
    chosen = {}
    for users, speeds in sorted(by_users.items()):
        drafts = max(speeds, key=lambda count: speeds[count])
        chosen[users] = drafts if speeds[drafts] > _WORTH * speeds[0] else 0
    return chosen


def schedule(chosen: Mapping[int, int], *, most: int) -> Schedule:
    """Return the table of drafts by batch size: each choice holds up to half way to the next larger crowd."""
    sizes = sorted(chosen)
    edges = [0, *((low + high) // 2 for low, high in pairwise(sizes)), max(most, sizes[-1])]
    rows: list[tuple[int, int, int]] = []
    for (low, high), size in zip(pairwise(edges), sizes, strict=True):
        if rows and rows[-1][2] == chosen[size]:
            rows[-1] = (rows[-1][0], high, chosen[size])
        else:
            rows.append((low + 1, high, chosen[size]))
    return tuple(rows)
