"""Levels of a simulated engine: the real level controller and guards, on answers of a simulation."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from powerband.bench import analysis, guards
from powerband.bench.level import PROBE_RATE_SHARE, Block
from powerband.bench.level_controller import LevelController, Plan
from powerband.core.measurement import GRID, Distribution, Level, Timeline, Verdict
from powerband.core.records import OUTCOMES, Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.errors import EngineFailed
from powerband.load import prompts
from powerband.load.generator import LoadProgress
from powerband.plan.predict import Requests
from powerband.plan.simulate import Outcome

_PROBE_USERS = 8
_GUARDS = ("overload", "concurrency", "lost answers", "sample size")  # that a simulation can fail
_WARMUP_S, _MAX_WARMUP_S = 5.0, 120.0  # requests for a warm-up and a drain of this length are simulated
_TICK_S = 0.05  # between two looks of the controller
_OVERHEAD_S = 1.5  # of each level: wait until the engine is idle, connect, analyse


@dataclass(frozen=True)
class Load:
    """Requests to answer; in a closed loop `due` has the first one of each user."""

    due: Sequence[float]
    prompts: Sequence[int]
    outputs: Sequence[int]
    cached_share: float
    closed: bool


T = TypeVar("T")


@dataclass(frozen=True)
class _Traffic:
    """What the level controller reads of prepared traffic."""

    due_s: Sequence[float]
    turns: int = 1

    def __len__(self) -> int:
        return len(self.due_s)


Answer = Callable[[Load], Outcome]


class VirtualLevels:
    """Measures blocks of requests in virtual time."""

    ended = False

    def __init__(self, engine: Callable[[], Answer], requests: Requests, slo: SLO | None) -> None:
        self.engine, self.requests, self.slo = engine, requests, slo

    async def start_rate(self, workload: Workload) -> float:
        """Return the rate at which a climb starts: a share of the throughput of a short closed loop."""
        found = self.engine()(self._load(_PROBE_USERS, 2 * _PROBE_USERS, 0.0, seed=workload.seed + 2**31))
        ends = [due + e2e for due, e2e in zip(found.due, found.e2e, strict=True)]
        if not ends:
            return 0.01
        await asyncio.sleep(max(ends))
        return max(0.01, PROBE_RATE_SHARE * len(ends) / max(ends))

    async def measure(self, plan: Plan) -> Block:
        """Run one block of a level."""
        users, rate, answer = prompts.users(plan.workload), plan.requests / plan.window_s, self.engine()
        spare, most = (4 * users, 64 * users) if users else (rate * _WARMUP_S, rate * _MAX_WARMUP_S)
        while True:  # simulate more requests until the level ends before they do
            load = self._load(users, plan.requests + int(spare), rate, seed=plan.workload.seed)
            found = answer(load)
            if not found.due:
                raise EngineFailed("rejects every request", hint="read the engine's log", failure="context_too_long")
            controller = LevelController(plan, _Traffic(load.due), slo=self.slo, stopping=threading.Event())  # type: ignore[arg-type]
            records, elapsed_s, ended = _play(controller, load, found)
            if users:
                cut = len(records) > len(load.prompts) - users
            else:
                cut = not controller.early and controller.window_end_s >= load.due[-1]
            if (ended and not cut) or spare >= most:
                break
            spare *= 3
        await asyncio.sleep(_OVERHEAD_S + elapsed_s)
        return _block(plan, controller, records, found, elapsed_s, self.slo)

    def combine(self, blocks: Sequence[Block]) -> Level:
        """Return the level of blocks of the same load."""
        plan, measured = blocks[0].plan, Records()
        for block in blocks:
            measured.extend(block.measured)
        window_s, failed = sum(block.window_s for block in blocks), sum(block.failed for block in blocks)
        users, found = prompts.users(plan.workload), analysis.samples(measured) if len(measured) else {}
        return Level(
            rate_per_s=None if users else plan.requests / plan.window_s,
            users=users or None,
            seeds=(plan.workload.seed,),
            warmup_s=blocks[0].warmup_s,
            window_s=window_s,
            requests=len(measured),
            failed=failed,
            achieved_per_s=sum(block.departed for block in blocks) / window_s if len(measured) else 0.0,
            slo_checks=analysis.slo_checks(self.slo, found, failed=failed) if self.slo and found else (),
            prompt_tokens_per_s=0.0,
            output_tokens_per_s=0.0,
            tokens_per_chunk=1.0,
            latencies={name: _distribution(sample) for name, sample in found.items()},
            client={},
            timeline=blocks[-1].timeline,
            verdicts=tuple(verdict for block in blocks for verdict in block.verdicts),
            stopped_early=blocks[-1].early,
            decided=blocks[-1].decided,
        )

    def _load(self, users: int, count: int, rate_per_s: float, *, seed: int) -> Load:
        """Return the workload's requests from a random place on, at a rate or for a number of users."""
        draw, own = random.Random(seed), self.requests
        gaps = [late - early for early, late in pairwise(own.due)]
        due = [0.0] * users if users else list(accumulate(gap / rate_per_s for gap in _cycle(gaps, count, draw)))
        lengths = list(zip(own.prompts, own.outputs, strict=False))
        chosen = list(_cycle(lengths, count, draw))
        return Load(
            due, [one for one, _ in chosen], [one for _, one in chosen], own.lengths.cached_share, closed=users > 0
        )


def _cycle(values: Sequence[T], count: int, draw: random.Random) -> Iterator[T]:
    start = draw.randrange(len(values))
    return (values[(start + number) % len(values)] for number in range(count))


def _play(controller: LevelController, load: Load, found: Outcome) -> tuple[Records, float, bool]:
    """Show the answers to the level controller; return them, the level's duration, and whether it was ended."""
    due, firsts = found.due, [one + wait for one, wait in zip(found.due, found.ttft, strict=True)]
    ends = [one + whole for one, whole in zip(found.due, found.e2e, strict=True)]
    sent, first_sorted = sorted(due), sorted(firsts)
    records, now, tick, done = Records(), 0.0, 0.0, 0
    order = sorted(range(len(ends)), key=ends.__getitem__)
    moments = sorted({*ends, *sent})
    for moment, later in zip(moments, [*moments[1:], math.inf], strict=True):
        now = moment
        while done < len(order) and ends[order[done]] <= now:
            number = order[done]
            _add(records, number, due[number], firsts[number], ends[number], load)
            done += 1
        if later < tick + _TICK_S:
            continue
        tick, arrived = now, bisect_right(sent, now)
        awaiting = arrived - bisect_right(first_sorted, now)
        if controller(LoadProgress(now, done, arrived - done, awaiting), records):
            return records, now, True
    return records, now, False


def _add(records: Records, number: int, due_s: float, first_s: float, end_s: float, load: Load) -> None:
    output = load.outputs[number]
    due, first, end = (int(one * 1e9) for one in (due_s, first_s, end_s))
    records.add(
        (), number=number, due=due, sent=due, head=first, first=first, end=end, status=200,
        outcome=OUTCOMES.index("answered"), done=1, retried=0, asked=output, prompt=load.prompts[number], output=output,
        chunks=output, finish=2, engine_us=0,
    )  # fmt: skip


def _block(
    plan: Plan, controller: LevelController, records: Records, found: Outcome, elapsed_s: float, slo: SLO | None
) -> Block:
    """Return the records of the window, judged by the guards that need no real engine."""
    users, begin_s = controller.users, controller.window_start_s or 0.0
    end_s = min(controller.window_end_s, elapsed_s)
    window_s = max(1e-9, end_s - begin_s)
    begin, end = int(begin_s * 1e9), int(end_s * 1e9)
    ordered = records.ordered("end" if users else "due")
    key = ordered["end" if users else "due"]
    measured = ordered.select(range(bisect_left(key, begin), bisect_left(key, end)))
    departed = sum(begin <= when < end for when in records["end"])
    ends = [due + e2e for due, e2e in zip(found.due, found.e2e, strict=True)]
    inside = [late for due, late in zip(found.due, ends, strict=True) if begin_s <= due < end_s]
    busy_s = sum(max(0.0, min(late, end_s) - max(due, begin_s)) for due, late in zip(found.due, ends, strict=True))
    drained = not (users or controller.early or controller.decided)
    unanswered = drained * sum(late > elapsed_s for late in inside)
    failed = found.rejected + unanswered
    evidence = guards.Evidence(
        workload=plan.workload, slo=slo, records=measured, failed=found.rejected, unanswered=unanswered, errors={},
        window_s=window_s, arrived=len(measured) if users else len(inside), departed=departed,
        mean_in_flight=busy_s / window_s, users=users,
        capped=False, client_cpu_share=0.0, repeats=0, cacheable_share=1.0, warmup_s=begin_s,
    )  # fmt: skip
    return Block(
        plan=plan, measured=measured, failed=failed, errors={}, departed=departed, warmup_s=begin_s, window_s=window_s,
        client={}, engine={}, crosschecks=(), timeline=Timeline(at_s=(), in_flight=()),
        verdicts=tuple(_verdicts(evidence)), early=controller.early, decided=controller.decided, records_name="",
    )  # fmt: skip


def _verdicts(evidence: guards.Evidence) -> Iterator[Verdict]:
    for name in _GUARDS:
        if found := guards.GUARDS[name](evidence):
            yield Verdict(guard=name, valid=False, sentence=found[0], hint=found[1])


def _distribution(sample: analysis.Sample) -> Distribution:
    """Return the quantiles that the search reads, without the intervals, which take most of the time."""
    grid = tuple(sample.quantile(p) for p in GRID)
    return Distribution(count=len(sample.ordered), effective=1, mean=sample.mean, percentiles={}, grid=grid)
