"""The check of replicas side by side: devices of their own, and about the same speed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from powerband.core.allocation import capacity, share_of_cores
from powerband.runtime.replica import Replica
from powerband.selftest.check import Check, Outcome, failed, not_possible, not_run, passed
from powerband.selftest.engine_run import EngineRun, closed_loop, refusals

_MOST_ON_GPUS, _MOST_ON_CPU = 8, 2
_USERS, _REQUESTS = 4, 16
_MIN_SPEED = 0.75  # of the fastest replica
_START_MARGIN = 3.0


async def _replicas(run: EngineRun) -> Outcome:
    if run.start_s is None:
        return not_run("no engine start")
    if run.deadline.remaining_s < _START_MARGIN * run.start_s:
        return not_run("out of time", needed_s=_START_MARGIN * run.start_s)
    config = run.probe_deployment().config.model_dump(exclude_defaults=True)
    share = None if run.host.gpus else share_of_cores(run.host, _MOST_ON_CPU)
    prepared = run.prepare(run.deployment(config, cores=share))
    count = min(capacity(prepared.host, prepared.need), _MOST_ON_GPUS if run.host.gpus else _MOST_ON_CPU)
    if count < 2 or refusals(prepared):
        return not_possible("too few devices", replicas=count)
    async with AsyncExitStack() as stack:
        launched = [run.launch(prepared, f"replica-{number}") for number in range(count)]
        started = await asyncio.gather(*map(stack.enter_async_context, launched), return_exceptions=True)
        for one in started:
            if isinstance(one, BaseException):
                raise one
        return await _compared(run, [one for one in started if isinstance(one, Replica)])


async def _compared(run: EngineRun, replicas: list[Replica]) -> Outcome:
    """Measure each replica while the others are idle, then all at the same time."""
    units = [unit for one in replicas for unit in one.allocation.units]
    if len(units) != len(set(units)):
        return failed("units shared", replicas=len(replicas))
    alone = [
        await closed_loop(one, users=_USERS, requests=_REQUESTS, seed=number) for number, one in enumerate(replicas)
    ]
    run.report(f"{run.engine}: {len(replicas)} replicas at the same time")
    loops = (
        closed_loop(one, users=_USERS, requests=_REQUESTS, seed=100 + number) for number, one in enumerate(replicas)
    )
    together = await asyncio.gather(*loops)
    speeds = {
        _place(one, number): loop.tokens_per_s for number, (one, loop) in enumerate(zip(replicas, alone, strict=True))
    }
    fastest = max(speeds.values())
    figures: dict[str, float | str] = {
        "replicas": len(replicas),
        "fastest_tokens_per_s": fastest,
        "together_share": sum(one.tokens_per_s for one in together) / sum(speeds.values()),
        **{f"{place}_tokens_per_s": speed for place, speed in speeds.items()},
    }
    if broken := sum(one.failed for one in (*alone, *together)):
        return failed("requests failed", figures, requests=broken)
    slow = {place: speed for place, speed in speeds.items() if speed < _MIN_SPEED * fastest}
    if slow:
        return failed("replicas unequal", figures, slow=len(slow), slowest=min(slow, key=lambda one: slow[one]))
    return passed(figures)


def _place(one: Replica, number: int) -> str:
    """Return the place of a replica: the indices of its GPUs, or its number."""
    gpus = one.allocation.gpus
    return f"GPU-{'+'.join(str(gpu.index) for gpu in gpus)}" if gpus else f"replica-{number}"


CHECK = Check("replicas", "replicas side by side have devices of their own and the same speed", _replicas)
