"""One level: apply a load until it is steady, measure a window, and keep the load until the window is answered."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from powerband import metrics
from powerband.bench import analysis, crosscheck, guards
from powerband.bench.level_controller import MAX_WARMUP_S, MIN_DRAIN_S, LevelController, LevelStatus, Plan
from powerband.bench.monitor import Monitor, wait_until_idle
from powerband.core import statistics
from powerband.core.measurement import CrossCheck, Level, Timeline, Verdict
from powerband.core.records import OUTCOMES, Records
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload
from powerband.load import generator, prompts
from powerband.load.generator import LoadProgress, Run
from powerband.load.tokens import Vocabulary
from powerband.load.wire import Target
from powerband.runtime.replica import Replica
from powerband.store import records as record_files

PROBE_RATE_SHARE = 0.7  # a climb starts at this share of the rate that a probe reaches
_PROBE_USERS = 8
_MAX_TIMELINE_POINTS = 300
_MAX_ERRORS = 5  # kinds of error to report


@dataclass
class Bench:
    """Context shared by the levels of one run."""

    replica: Replica
    target: Target
    vocabulary: Vocabulary
    directory: Path
    counts_at_end: bool = False
    slo: SLO | None = None
    base: Path | None = None  # folder of the workload's relative paths
    max_in_flight: int = 0  # 0: no limit
    senders: int = 1
    price_per_h: float | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    on_status: Callable[[LevelStatus], None] = lambda _: None
    levels: int = 0  # blocks measured so far

    @property
    def ended(self) -> bool:
        """Return whether nothing more can be measured; the first level of an engine that exited says so."""
        return self.stopping.is_set() or (self.replica.exited() is not None and self.levels > 0)

    async def start_rate(self, workload: Workload) -> float:
        """Return the rate at which a climb starts: a share of the throughput of a short closed-loop probe."""
        probe = workload.with_users(_PROBE_USERS).with_seed(workload.seed + 2**31)
        traffic = prompts.prepare(probe, 4 * _PROBE_USERS, vocabulary=self.vocabulary, base=self.base)

        def enough_answers(_: LoadProgress, records: Records) -> bool:
            return self.stopping.is_set() or len(records) >= 2 * _PROBE_USERS

        run = await asyncio.to_thread(generator.drive, self.target, traffic, until=enough_answers)
        return max(0.01, PROBE_RATE_SHARE * sum(run.records.complete()) / max(0.001, run.elapsed_s))

    def combine(self, blocks: Sequence[Block]) -> Level:
        """Return the level of blocks of the same load."""
        return pool(blocks, slo=self.slo, price_per_h=self.price_per_h)

    async def measure(self, plan: Plan) -> Block:
        """Run one block of a level and judge it."""
        # Enough requests for warm-up, window and drain. With turns, each session counts as several requests.
        users = prompts.users(plan.workload)
        span_s = MAX_WARMUP_S + 2 * plan.window_s + MIN_DRAIN_S
        per_s = plan.requests / plan.window_s
        turns = plan.workload.turns.count if plan.workload.turns else 1
        count = max(3 * plan.requests, int(per_s * span_s / turns) + 1, 4 * users)
        traffic = await asyncio.to_thread(
            prompts.prepare, plan.workload, count, vocabulary=self.vocabulary, base=self.base
        )
        controller = LevelController(plan, traffic, slo=self.slo, stopping=self.stopping)
        await wait_until_idle(self.replica)

        def until(progress: LoadProgress, records: Records) -> bool:
            self.on_status(controller.status(progress))
            return controller(progress, records)

        async with Monitor(self.replica) as monitor:
            exit_watch = asyncio.create_task(self._stop_when_engine_exits(controller))
            run = await asyncio.to_thread(
                generator.drive,
                self.target,
                traffic,
                max_in_flight=self.max_in_flight,
                senders=self.senders,
                until=until,
            )
            exit_watch.cancel()
        self.levels += 1
        name = f"level-{self.levels:02d}.npz"
        await asyncio.to_thread(record_files.write, self.directory / name, run.records)
        return analyse_block(self, plan, traffic, run, controller, monitor, records_name=name)

    async def _stop_when_engine_exits(self, controller: LevelController) -> None:
        exits = [asyncio.ensure_future(one.process.exited.wait()) for one in self.replica.members if one.process]
        if exits:
            try:
                await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in exits:
                    one.cancel()
            process = self.replica.exited()
            controller.died = f"exit code {process.exit_code if process else None}"


@dataclass
class Block:
    """One run at one load: the records of its window, engine figures and guard verdicts."""

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
    decided: str | None
    records_name: str


def analyse_block(
    bench: Bench,
    plan: Plan,
    traffic: prompts.Traffic,
    run: Run,
    controller: LevelController,
    monitor: Monitor,
    *,
    records_name: str,
) -> Block:
    """Select the records of the window, cross-check them with the engine, and judge them."""
    begin_s = controller.window_start_s or 0.0
    end_s = min(controller.window_end_s, run.elapsed_s)
    window_s = max(1e-9, end_s - begin_s)
    begin, end = int(begin_s * 1e9), int(end_s * 1e9)
    users = controller.users
    # In a closed loop, selecting by due time would leave out long answers that start before the window and end in it.
    by = "end" if users else "due"
    records = run.records.ordered(by)
    key = records[by]
    inside = [row for row in range(len(records)) if begin <= key[row] < end]
    complete = list(records.complete())
    # A cancelled request counts as failed only if it was unanswered at the end of the drain period.
    cancelled = OUTCOMES.index("cancelled")
    failed = sum(not complete[row] and records["outcome"][row] != cancelled for row in inside)
    drained = controller.early is None and controller.decided is None and not users
    unsent = 0 if users else sum(begin <= due < end for due in run.unsent_due)  # never sent because of --max-in-flight
    unanswered = drained * (unsent + sum(records["outcome"][row] == cancelled for row in inside))
    measured = records.select(row for row in inside if complete[row])
    departed = sum(begin <= when < end for when in records["end"])
    in_flight = _mean_in_flight(records, begin, end)
    samples = monitor.between(run.started_ns + begin, run.started_ns + end)
    background, stolen = monitor.background_share(samples)
    checks = crosscheck.crosschecks(records, monitor, samples, run.started_ns, at_end=bench.counts_at_end)
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
        capped=bench.max_in_flight > 0,
        client_cpu_share=run.client_cpu_s / max(run.elapsed_s, 1e-9),
        repeats=_repeats(traffic, len(records)),
        cacheable_share=crosscheck.cacheable_share(traffic, measured),
        gauges=monitor.gauges,
        crosschecks=checks,
        background_cpu_share=background,
        stolen_cpu_share=stolen,
        warmup_s=begin_s,
        session_s=_session_s(controller, run),
        died=controller.died,
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
            **({"foreign_cpu_share": background} if background is not None else {}),
        },
        engine=crosscheck.engine_figures(monitor, samples, traffic),
        crosschecks=tuple(checks),
        timeline=_timeline(controller, monitor, run.started_ns),
        verdicts=tuple(guards.judge(evidence)),
        early=controller.early,
        decided=controller.decided,
        records_name=records_name,
    )


def _session_s(controller: LevelController, run: Run) -> float:
    if not controller.in_sessions:
        return 0.0
    return statistics.quantile(sorted(controller.sessions_s or [run.elapsed_s]), 0.5)


def pool(blocks: Sequence[Block], *, slo: SLO | None, price_per_h: float | None) -> Level:
    """Combine blocks of the same load into one level; a guard that fails for one block fails for the level."""
    plan, users = blocks[0].plan, prompts.users(blocks[0].plan.workload)
    measured, window_s = Records(), sum(block.window_s for block in blocks)
    for block in blocks:
        measured.extend(block.measured)
    failed, departed = sum(block.failed for block in blocks), sum(block.departed for block in blocks)
    errors: dict[str, int] = {}
    for block in blocks:
        errors |= {what: errors.get(what, 0) + count for what, count in block.errors.items()}
    found = analysis.samples(measured) if len(measured) else {}
    checks = analysis.slo_checks(slo, found, failed=failed) if slo and found else ()
    attainment = goodput = None
    if slo and found:
        total = len(measured) + failed
        attainment = statistics.wilson(analysis.good(slo, measured), total)
        rate = total / window_s
        goodput = Interval(attainment.value * rate, attainment.low * rate, attainment.high * rate)
    prompt_per_s, output_per_s = sum(measured["prompt"]) / window_s, sum(metrics.tokens(measured)) / window_s
    both_per_s = prompt_per_s + output_per_s if prompt_per_s else 0.0  # 0: the server reports no prompt tokens
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
        errors=dict(sorted(errors.items(), key=lambda item: -item[1])[:_MAX_ERRORS]),
        achieved_per_s=departed / window_s if len(measured) else 0.0,
        attainment=attainment,
        goodput_per_s=goodput,
        slo_checks=checks,
        answered_enough=slo is None or failed <= (1 - slo.success) * (len(measured) + failed),
        prompt_tokens_per_s=prompt_per_s,
        output_tokens_per_s=output_per_s,
        tokens_per_chunk=sum(metrics.tokens(measured)) / max(1, sum(measured["chunks"])),
        cost_per_1m_output_tokens=_cost_per_1m(price_per_h, output_per_s),
        cost_per_1m_tokens=_cost_per_1m(price_per_h, both_per_s),
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
        decided=last.decided,
        records=tuple(block.records_name for block in blocks),
    )


def _cost_per_1m(price_per_h: float | None, tokens_per_s: float) -> float | None:
    return price_per_h / 3600 / tokens_per_s * 1e6 if price_per_h is not None and tokens_per_s else None


def _repeats(traffic: prompts.Traffic, sent: int) -> int:
    """Return how many of the sent requests repeat an earlier prompt, without the repeats that the workload allows."""
    return round(traffic.text.repeats * min(1.0, sent / max(1, len(traffic) * traffic.turns)))


def _mean_in_flight(records: Records, begin: int, end: int) -> float:
    rows = zip(records["sent"], records["end"], strict=True)
    return sum(max(0, min(late, end) - max(early, begin)) for early, late in rows) / max(1, end - begin)


def _timeline(controller: LevelController, monitor: Monitor, started_ns: int) -> Timeline:
    """Return client and engine gauges at the monitor's sample times, thinned to a maximum number of points."""
    step = max(1, len(monitor.at_ns) // _MAX_TIMELINE_POINTS)
    samples = range(0, len(monitor.at_ns), step)
    at = [(monitor.at_ns[index] - started_ns) / 1e9 for index in samples]
    return Timeline(
        at_s=tuple(round(at_s, 3) for at_s in at),
        in_flight=tuple(_value_at(controller.in_flight, at_s) for at_s in at),
        queue_depth=tuple(monitor.gauges[index].queue_depth for index in samples),
        running=tuple(monitor.gauges[index].running for index in samples),
        kv_use=tuple(monitor.gauges[index].kv_use for index in samples),
    )


def _value_at(series: list[tuple[float, int]], at_s: float) -> float:
    index = bisect_left(series, (at_s, 0))
    return float(series[min(index, len(series) - 1)][1]) if series and at_s >= 0 else 0.0
