"""One level: hold a load until it is steady, measure a window, hold it until the window's last answer is in."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from powerband import metrics
from powerband.bench import analysis, crosscheck, guards
from powerband.bench.level_controller import LEAST_DRAIN_S, MOST_WARM_S, LevelController, Plan
from powerband.bench.monitor import Monitor, wait_until_idle
from powerband.core import statistics
from powerband.core.measurement import CrossCheck, Level, Timeline, Verdict
from powerband.core.records import OUTCOMES, Records
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.load import generator, prompts
from powerband.load.generator import LoadProgress, Run
from powerband.load.tokens import Vocabulary
from powerband.load.wire import Target
from powerband.runtime.replica import Replica
from powerband.store import records as record_files

_MOST_POINTS = 300  # of a timeline


@dataclass
class Bench:
    """What the levels of one run share."""

    replica: Replica
    target: Target
    vocabulary: Vocabulary
    directory: Path
    counts_at_end: bool = False
    slo: SLO | None = None
    base: Path | None = None  # of the workload's own paths
    limit: int = 0
    senders: int = 1
    price_per_h: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    on_progress: Callable[[Plan, LoadProgress, LevelController], None] = lambda *_: None
    levels: int = 0

    async def measure(self, plan: Plan) -> Block:
        """Run one block of a level and judge it."""
        # A rate of sessions is that of requests over the turns; what is prepared lasts for warm-up, window and drain.
        users = prompts.users(plan.workload)
        span_s = MOST_WARM_S + 2 * plan.window_s + LEAST_DRAIN_S
        per_s = plan.requests / plan.window_s
        turns = plan.workload.turns.count if plan.workload.turns else 1
        count = max(3 * plan.requests, int(per_s * span_s / turns) + 1, 4 * users)
        traffic = await asyncio.to_thread(
            prompts.prepare, plan.workload, count, vocabulary=self.vocabulary, base=self.base
        )
        steering = LevelController(plan, traffic, slo=self.slo, stopping=self.stopping)
        await wait_until_idle(self.replica)

        def until(progress: LoadProgress, records: Records) -> bool:
            self.on_progress(plan, progress, steering)
            return steering(progress, records)

        async with Monitor(self.replica) as watch:
            death = asyncio.create_task(self._die_with_engine(steering))
            run = await asyncio.to_thread(
                generator.drive, self.target, traffic, limit=self.limit, senders=self.senders, until=until
            )
            death.cancel()
        self.levels += 1
        name = f"level-{self.levels:02d}.npz"
        await asyncio.to_thread(record_files.write, self.directory / name, run.records)
        return observe(self, plan, traffic, run, steering, watch, records_name=name)

    async def _die_with_engine(self, steering: LevelController) -> None:
        process = self.replica.process
        if process is not None:
            await process.ended.wait()
            steering.died = f"exit code {process.exit_code}"


@dataclass
class Block:
    """One run at one load: the records of its window and all that was seen beside them."""

    plan: Plan
    measured: Records
    failed: int
    errors: dict[str, int]
    departed: int
    warmup_s: float
    window_s: float
    client: dict[str, float]
    engine: dict[str, float]
    crosschecks: tuple[CrossCheck, ...]
    timeline: Timeline
    verdicts: tuple[Verdict, ...]
    early: str | None
    records_name: str


def observe(
    bench: Bench,
    plan: Plan,
    traffic: prompts.Traffic,
    run: Run,
    steering: LevelController,
    watch: Monitor,
    *,
    records_name: str,
) -> Block:
    """Pick the window out of what happened, reconcile it with the engine, judge it."""
    begin_s = steering.warm_s or 0.0
    end_s = min(steering.end_s, run.elapsed_s)
    window_s = max(1e-9, end_s - begin_s)
    begin, end = int(begin_s * 1e9), int(end_s * 1e9)
    users = steering.users
    by = "end" if users else "due"  # of those who wait: what began before the window and ends in it is long
    records = run.records.ordered(by)
    key = records[by]
    inside = [row for row in range(len(records)) if begin <= key[row] < end]
    complete = list(records.complete())
    # A request that we cancelled ourselves failed only where we gave up on it after its window.
    cancelled = OUTCOMES.index("cancelled")
    failed = sum(not complete[row] and records["outcome"][row] != cancelled for row in inside)
    gave_up = steering.early is None and not users
    unsent = 0 if users else sum(begin <= due < end for due in run.unsent_due)  # held back by a cap until the end
    unanswered = gave_up * (unsent + sum(records["outcome"][row] == cancelled for row in inside))
    measured = records.select(row for row in inside if complete[row])
    departed = sum(begin <= when < end for when in records["end"])
    in_flight = _mean_in_flight(records, begin, end)
    places = watch.between(run.started_ns + begin, run.started_ns + end)
    foreign, stolen = watch.foreign_share(places)
    agreements = crosscheck.crosschecks(records, watch, places, run.started_ns, at_end=bench.counts_at_end)
    evidence = guards.Evidence(
        workload=plan.workload,
        slo=bench.slo,
        records=measured,
        failed=failed,
        unanswered=unanswered,
        errors=run.errors,
        window_s=window_s,
        arrived=len(inside) + unsent,
        departed=departed,
        mean_in_flight=in_flight,
        users=users,
        capped=bench.limit > 0,
        client_cpu_share=run.client_cpu_s / max(run.elapsed_s, 1e-9),
        repeats=_repeats(traffic, len(records)),
        known_share=crosscheck.known_share(traffic, measured),
        gauges=watch.gauges,
        crosschecks=agreements,
        foreign_cpu_share=foreign,
        stolen_cpu_share=stolen,
        warmup_s=begin_s,
        session_s=_session_s(steering, run),
        died=steering.died,
    )
    return Block(
        plan=plan,
        measured=measured,
        failed=failed + unanswered,
        errors=run.errors,
        departed=departed,
        warmup_s=begin_s,
        window_s=window_s,
        client={
            "cpu_share": evidence.client_cpu_share,
            "prepared_s": run.prepared_s,
            "worst_wake_s": run.worst_wake_s,
            "mean_in_flight": in_flight,
            **({"foreign_cpu_share": foreign} if foreign is not None else {}),
        },
        engine=crosscheck.engine_figures(watch, places, traffic),
        crosschecks=tuple(agreements),
        timeline=_timeline(steering, watch, run.started_ns),
        verdicts=tuple(guards.judge(evidence)),
        early=steering.early,
        records_name=records_name,
    )


def _session_s(steering: LevelController, run: Run) -> float:
    if not steering.in_sessions:
        return 0.0
    return statistics.quantile(sorted(steering.sessions_s or [run.elapsed_s]), 0.5)


def pool(bench: Bench, blocks: Sequence[Block]) -> Level:
    """Make one level of blocks of the same load; a guard that refuses one of them refuses it."""
    plan, users = blocks[0].plan, prompts.users(blocks[0].plan.workload)
    measured, window_s = Records(), sum(block.window_s for block in blocks)
    for block in blocks:
        measured.extend(block.measured)
    failed, departed = sum(block.failed for block in blocks), sum(block.departed for block in blocks)
    errors: dict[str, int] = {}
    for block in blocks:
        errors |= {what: errors.get(what, 0) + count for what, count in block.errors.items()}
    found = analysis.samples(measured) if len(measured) else {}
    promises = analysis.slo_checks(bench.slo, found, failed=failed) if bench.slo and found else ()
    attainment = goodput = None
    if bench.slo and found:
        total = len(measured) + failed
        attainment = statistics.wilson(analysis.good(bench.slo, measured), total)
        rate = total / window_s
        goodput = Interval(attainment.value * rate, attainment.low * rate, attainment.high * rate)
    output_per_s = sum(metrics.tokens(measured)) / window_s
    priced = bench.price_per_h is not None and output_per_s > 0
    last = blocks[-1]
    verdicts = [
        next((one for one in same if not one.valid), same[0])
        for same in zip(*(block.verdicts for block in blocks), strict=True)
    ]
    return Level(
        rate_per_s=None if users else plan.requests / plan.window_s,
        users=users or None,
        seeds=tuple(block.plan.workload.seed for block in blocks),
        warmup_s=blocks[0].warmup_s,
        window_s=window_s,
        requests=len(measured),
        failed=failed,
        errors=dict(sorted(errors.items(), key=lambda item: -item[1])[:5]),
        achieved_per_s=departed / window_s if len(measured) else 0.0,
        attainment=attainment,
        goodput_per_s=goodput,
        slo_checks=promises,
        answered_enough=bench.slo is None or failed <= (1 - bench.slo.success) * (len(measured) + failed),
        prompt_tokens_per_s=sum(measured["prompt"]) / window_s,
        output_tokens_per_s=output_per_s,
        tokens_per_chunk=sum(metrics.tokens(measured)) / max(1, sum(measured["chunks"])),
        cost_per_1m_output_tokens=(bench.price_per_h or 0) / 3600 / output_per_s * 1e6 if priced else None,
        latencies={name: analysis.distribution(sample) for name, sample in found.items()},
        client={
            "send_lag_p99_s": statistics.quantile(sorted(metrics.send_lag(measured)) or [0.0], 0.99),
            **last.client,
        },
        engine=last.engine,
        crosschecks=last.crosschecks,
        timeline=last.timeline,
        verdicts=tuple(verdicts),
        stopped_early=last.early,
        records=tuple(block.records_name for block in blocks),
    )


def _repeats(traffic: prompts.Traffic, sent: int) -> int:
    """Return how many of the sent requests had a prompt that was sent before, beyond what the workload says."""
    return round(traffic.text.repeats * min(1.0, sent / max(1, len(traffic) * traffic.turns)))


def _mean_in_flight(records: Records, begin: int, end: int) -> float:
    rows = zip(records["sent"], records["end"], strict=True)
    return sum(max(0, min(late, end) - max(early, begin)) for early, late in rows) / max(1, end - begin)


def _timeline(steering: LevelController, watch: Monitor, started_ns: int) -> Timeline:
    """Return the client's requests in flight at the moments of the engine's readings, thinned."""
    step = max(1, len(watch.at_ns) // _MOST_POINTS)
    places = range(0, len(watch.at_ns), step)
    at = [(watch.at_ns[place] - started_ns) / 1e9 for place in places]
    return Timeline(
        at_s=tuple(round(moment, 3) for moment in at),
        in_flight=tuple(_at(steering.seen, moment) for moment in at),
        queue_depth=tuple(watch.gauges[place].queue_depth for place in places),
        running=tuple(watch.gauges[place].running for place in places),
        kv_use=tuple(watch.gauges[place].kv_use for place in places),
    )


def _at(seen: list[tuple[float, int]], moment: float) -> float:
    place = bisect_left(seen, (moment, 0))
    return float(seen[min(place, len(seen) - 1)][1]) if seen and moment >= 0 else 0.0
