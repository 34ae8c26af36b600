"""The stage `bench`: hold loads against one server, and answer with a measurement that may be believed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import powerband
from powerband import engines
from powerband.bench import profiles
from powerband.bench.level import Bench, Block, pool
from powerband.bench.level_controller import LevelController, Plan
from powerband.bench.profiles import Amount, inconclusive, meets_slo
from powerband.core.measurement import Level, Measurement
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.engines.base import Engine
from powerband.errors import InputError
from powerband.launchers.local import Prepared
from powerband.load import generator, prompts, tokens, wire
from powerband.load.generator import LoadProgress
from powerband.load.wire import Target
from powerband.runtime.replica import Replica

Profile = Literal["level", "sweep", "climb"]
_PROBE_USERS, _PROBE_SHARE = 8, 0.7


@dataclass(frozen=True)
class BenchSpec:
    """What to measure."""

    workload: Workload
    slo: SLO | None = None
    profile: Profile = "level"
    rates: tuple[float, ...] = ()
    start_per_s: float | None = None
    least_per_s: float | None = None  # a climb gives up where this rate breaks the SLO
    rough: bool = False  # a climb ends with a wide bracket, and confirms nothing; users who wait set their own pace
    amount: Amount = field(default_factory=Amount)
    base: Path | None = None  # of the workload's own paths
    blocks: int = 1
    hopeless: bool = False  # a level that cannot keep the SLO is given up early; users set their own pace here, too
    limit: int = 0
    senders: int = 1
    price_per_h: float | None = None
    tokenizer: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.profile == "climb" and self.slo is None:
            raise InputError("a climb needs a promise to keep", hint="give --slo, such as --slo interactive")
        if self.profile == "sweep" and not self.rates:
            raise InputError(
                "a sweep needs its rates", hint="give --rates 1,2,4, or --profile climb to find the highest"
            )


@dataclass
class Progress:
    """Who is told how it goes."""

    on_progress: Callable[[Plan, LoadProgress, LevelController], None] = lambda *_: None
    on_level: Callable[[Level], None] = lambda *_: None


async def bench(
    replica: Replica,
    prepared: Prepared,
    order: BenchSpec,
    *,
    directory: Path,
    stopping: threading.Event | None = None,
    listener: Progress | None = None,
) -> Measurement:
    """Measure a ready replica; when stopped, what was measured so far is the answer."""
    listener = listener or Progress()
    server = await _server(replica)
    headers = tuple(replica.request_headers.items())
    own = Bench(
        replica=replica,
        target=Target(replica.url, await replica.model_name(), headers, keep_alive=server.keeps_connections),
        counts_at_end=server.counts_at_end,
        vocabulary=tokens.vocabulary(order.tokenizer or prepared.deployment.variant.source),
        directory=directory,
        slo=order.slo,
        base=order.base,
        limit=order.limit,
        senders=order.senders,
        price_per_h=order.price_per_h,
        stopping=stopping or threading.Event(),
        on_progress=listener.on_progress,
    )
    steps = await _steps(own, order)
    levels: list[Level] = []
    blocks: list[Block] = []
    with contextlib.suppress(StopIteration):
        plan, same = next(steps)
        while not own.stopping.is_set():
            block = await own.measure(plan)
            blocks = [*blocks, block] if same else [block]
            level = pool(own, blocks)
            levels = [*levels[:-1], level] if same else [*levels, level]
            listener.on_level(level)
            if replica.process is not None and replica.process.ended.is_set():
                break
            plan, same = steps.send(level)
    return Measurement(
        name=prepared.deployment.served_name,
        profile=order.profile,
        workload=order.workload,
        slo=order.slo,
        levels=tuple(levels),
        best=_best(levels) if order.slo else None,
        interrupted=own.stopping.is_set(),
        startup_s=sum(timing.seconds for timing in replica.timings) if replica.process else None,
        price_per_h=order.price_per_h,
        provenance=provenance(prepared, order, own),
    )


async def _server(replica: Replica) -> Engine[Any]:
    """Return the adapter that knows this server: behind a URL it may be one that tells its name."""
    llamacpp = replica.engine.attaches and await replica.server_name() == "llama.cpp"
    return engines.get("llamacpp") if llamacpp else replica.engine


async def _steps(own: Bench, order: BenchSpec) -> profiles.Steps:
    if order.slo and prompts.users(order.workload) and (order.rough or order.hopeless):
        return profiles.closed_loop(order.workload, order.slo, order.amount)
    if order.profile == "climb":
        assert order.slo is not None
        start = order.start_per_s or await _first_guess(own, order.workload)
        return profiles.climb(
            order.workload,
            order.slo,
            order.amount,
            start_per_s=start,
            blocks=order.blocks,
            least_per_s=order.least_per_s or 0.0,
            rough=order.rough,
        )
    if order.profile == "sweep":
        return profiles.sweep(order.workload, order.slo, order.amount, rates=order.rates, blocks=order.blocks)
    workload = order.workload
    if workload.rate_per_s is None and not prompts.users(workload):  # a trace at its own speed
        workload = workload.at_rate(prompts.recorded_rate(workload, base=order.base))
    return profiles.one_level(workload, order.slo, order.amount, blocks=order.blocks, hopeless=order.hopeless)


async def _first_guess(own: Bench, workload: Workload) -> float:
    """Return where a climb begins: somewhat below what a few users who never pause get answered."""
    probe = workload.with_users(_PROBE_USERS).with_seed(workload.seed + 2**31)
    traffic = prompts.prepare(probe, 4 * _PROBE_USERS, vocabulary=own.vocabulary, base=own.base)

    def enough(_: LoadProgress, records: Records) -> bool:
        return own.stopping.is_set() or len(records) >= 2 * _PROBE_USERS

    run = await asyncio.to_thread(generator.drive, own.target, traffic, until=enough)
    return max(0.01, _PROBE_SHARE * sum(run.records.complete()) / max(0.001, run.elapsed_s))


def _best(levels: Sequence[Level]) -> int | None:
    """Return the highest load that keeps the SLO and lies below every load that breaks it.

    Of one load held twice the last word counts; a level whose measuring was disturbed says nothing.
    """
    rates = any(level.rate_per_s for level in levels)  # who was asked one at a time beside them shows no rate
    last = {level.load: number for number, level in enumerate(levels) if level.rate_per_s or not rates}
    broken = [_load(one) for one in map(levels.__getitem__, last.values()) if not (meets_slo(one) or inconclusive(one))]
    lowest = min(broken, default=math.inf)
    kept = [number for number in last.values() if meets_slo(levels[number]) and _load(levels[number]) < lowest]
    return max(kept, key=lambda number: _load(levels[number]), default=None)


def _load(level: Level) -> float:
    return level.rate_per_s or level.users or 0.0


def provenance(prepared: Prepared, order: BenchSpec, own: Bench) -> dict[str, Any]:
    """Return what anyone needs to know to measure the same again."""
    deployment, host = prepared.deployment, prepared.host
    return {
        "powerband": powerband.__version__,
        "python": platform.python_version(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": order.command or " ".join(sys.argv[1:]),
        "client": wire.kind(own.target),
        "tokens_by": "the model's tokenizer" if own.vocabulary.known else "words",
        "engine": prepared.installation.engine,
        "engine_version": prepared.installation.version,
        "engine_build": prepared.installation.build,
        "model": own.target.model,
        "model_bytes": prepared.model.weight_bytes,
        "deployment": deployment.to_data(),
        "deployment_digest": deployment.digest(),
        "workload_digest": order.workload.digest(),
        "slo_digest": order.slo.digest() if order.slo else None,
        "machine": {**host.described(), "kernel": platform.release()},
    }
