"""The check of the levers: every setting that this machine allows is switched on and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from powerband import engines
from powerband.core.allocation import NoRoom
from powerband.core.engine import Lever, Space
from powerband.errors import EngineFailed
from powerband.launchers.local import Prepared
from powerband.plan.probe import MAX_CONTEXT
from powerband.runtime.replica import Replica
from powerband.selftest import readback
from powerband.selftest.check import Check, Outcome, failed, not_run, passed
from powerband.selftest.engine_run import EngineRun, closed_loop, free_bytes, refusals

Settings = Mapping[str, str]  # lever to setting
_WEIGHTS_ON_DEVICE = 0.02  # share of a GPU's memory; CUDA's own memory is less
_START_MARGIN = 1.5  # of the first start's duration
_LOG_DETAILS = {"llamacpp": ("--verbosity", "4")}
_REQUESTS = 4
_GOOD = ("read-back", "accepted")


def groups(levers: Sequence[Lever], allowed: Callable[[Settings], bool]) -> tuple[list[Settings], list[Settings]]:
    """Return settings to start together, so that every allowed one is in a group, and those that are not allowed."""
    pending = {one.name: list(one.settings)[1:] for one in levers}
    found: list[Settings] = []
    while any(pending.values()):
        group: dict[str, str] = {}
        for lever, settings in pending.items():
            if setting := next((one for one in settings if allowed(group | {lever: one})), None):
                group[lever] = setting
                settings.remove(setting)
        if not group:
            break
        found.append(group)
    return found, [{lever: one} for lever, settings in pending.items() for one in settings]


async def _levers(run: EngineRun) -> Outcome:
    if run.start_s is None:
        return not_run("no engine start")
    space = engines.get(run.engine).space(model=run.model, host=run.host, context=MAX_CONTEXT)
    together, refused = groups(space.levers, lambda settings: not refusals(_prepared(run, space, settings)))
    figures: dict[str, float | str] = {_name(one): "not-possible" for one in refused}
    starts, details = 0, []
    while together:
        settings = together.pop(0)
        if run.deadline.remaining_s < _START_MARGIN * run.start_s:
            figures |= {_name(one): "not-run" for one in _single(settings)}
            continue
        starts += 1
        run.report(f"{run.engine}: {'  '.join(f'{lever}={one}' for lever, one in settings.items())}")
        try:
            figures |= await _tried(run, space, settings, starts)
        except EngineFailed as error:
            if len(settings) > 1:  # find out which of them it is
                together = [*_single(settings), *together]
            else:
                figures[_name(settings)] = error.failure
                details.append(f"{_name(settings)}: {error.message}")
        except NoRoom:  # another process holds the devices by now
            figures |= {_name(one): "not-possible" for one in _single(settings)}
    return _outcome(figures, starts, "; ".join(details))


def _outcome(found: Mapping[str, float | str], starts: int, detail: str) -> Outcome:
    tried = [one for one in found.values() if one not in ("not-possible", "not-run")]
    figures = {"starts": starts, "read_back": tried.count("read-back"), "settings": len(tried), **found}
    if "ignored" in tried:
        return failed("lever ignored", figures, detail=detail)
    if any(one not in _GOOD for one in tried):
        return failed("setting fails", figures, detail=detail)
    return passed(figures) if tried else not_run("out of time", figures)


async def _tried(run: EngineRun, space: Space, settings: Settings, number: int) -> dict[str, str]:
    """Start the engine with the settings; return the verdict on each."""
    prepared, before = _prepared(run, space, settings), free_bytes()
    async with run.launch(prepared, f"levers-{number}") as replica:
        loop = await closed_loop(replica, users=2, requests=_REQUESTS, seed=number)
        if loop.failed:
            raise _unanswered(replica, loop.failed)
        evidence = await _evidence(replica, prepared, before)
    knobs = {lever.name: lever.settings for lever in space.levers}
    return {_name(one): readback.verdict(_knobs(knobs, one), evidence) for one in _single(settings)}


def _unanswered(replica: Replica, requests: int) -> EngineFailed:
    dead = replica.process is not None and replica.process.exited.is_set()
    return EngineFailed(
        f"{requests} of {_REQUESTS} requests were not answered",
        hint=f"read the engine's log: {replica.log_path}",
        failure="died_on_first_request" if dead else "no_answer",
    )


async def _evidence(replica: Replica, prepared: Prepared, before: Mapping[str, int]) -> readback.Evidence:
    now, footprint = free_bytes(), prepared.footprint
    tokens, per_token = replica.readings().get("kv_tokens"), footprint.kv_bytes_per_token
    taken = [
        gpu for gpu in replica.allocation.gpus if before[gpu.id] - now[gpu.id] > _WEIGHTS_ON_DEVICE * gpu.memory_bytes
    ]
    return readback.Evidence(
        engine=prepared.engine.name,
        log=replica.log_path.read_text(errors="replace"),
        gauges=await replica.gauges(),
        devices=len(taken),
        kv_ratio=tokens * per_token / footprint.kv_bytes if tokens and per_token and footprint.kv_bytes else None,
    )


def _prepared(run: EngineRun, space: Space, settings: Settings) -> Prepared:
    chosen = {lever.name: lever.settings for lever in space.levers}
    short = run.probe_deployment().config.model_dump(exclude_defaults=True)  # a context that fits anywhere
    config = {**short, **space.always, **space.fast_start, **_knobs(chosen, settings)}
    config |= {"extra_args": _LOG_DETAILS[run.engine]} if run.engine in _LOG_DETAILS else {}
    return run.prepare(run.deployment(config))


def _knobs(chosen: Mapping[str, Mapping[str, Mapping[str, object]]], settings: Settings) -> dict[str, object]:
    return {knob: value for lever, one in settings.items() for knob, value in chosen[lever][one].items()}


def _single(settings: Settings) -> list[Settings]:
    return [{lever: one} for lever, one in settings.items()]


def _name(settings: Settings) -> str:
    return " ".join(f"{lever}={one}" for lever, one in settings.items())


CHECK = Check("levers", "every setting that is possible here is applied and read back", _levers)
