"""A rehearsal of a study, and simulated levels."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean

import pytest

from powerband import inputs
from powerband.bench import BenchSpec, measure_levels
from powerband.bench.profiles import Amount, max_rate
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.plan import device
from powerband.plan.options import Lengths, host_of
from powerband.plan.predict import Requests
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_work import Batch
from powerband.tune import rehearse, virtual_time
from powerband.tune.spec import TuneSpec
from powerband.tune.virtual_levels import Load, VirtualLevels

STEP_S, SLOTS, OUTPUT = 0.05, 10, 20  # the engine answers at most SLOTS / (STEP_S * OUTPUT) = 10 requests per second
SLO_1S = SLO.model_validate({"ttft": {"p90": "1s"}})
REQUESTS = Requests(
    [float(one) for one in range(1000)], [100] * 1000, [OUTPUT] * 1000, Lengths(100.0, float(OUTPUT), 128, 0.0)
)


def answer(load: Load) -> Outcome:
    def step_s(batch: Batch) -> float:
        return STEP_S

    limits = Limits(sequences=SLOTS, batched_tokens=100_000, kv_tokens=1e9)
    return simulate(load.due, load.prompts, load.outputs, step_s, limits, closed=load.closed)


def workload() -> Workload:
    return Workload.model_validate(
        {
            "arrivals": {"process": "poisson", "rate_per_s": 1},
            "prompt": {"shape": "fixed", "tokens": 100},
            "output": {"shape": "fixed", "tokens": OUTPUT},
        }
    )


def test_a_climb_in_virtual_time_finds_the_rate_of_the_simulated_engine() -> None:
    amount = Amount(min_requests=60, decide=True)
    spec = BenchSpec(workload(), SLO_1S, profile="climb", start_per_s=2.0, coarse=True, amount=amount)
    levels = virtual_time.run(measure_levels(VirtualLevels(lambda: answer, REQUESTS, SLO_1S), spec))
    found = max_rate(levels)
    assert found is not None and 8.0 < found < 11.5


def test_a_closed_loop_in_virtual_time_is_limited_by_the_slots() -> None:
    spec = BenchSpec(workload().with_users(40), None, amount=Amount(requests=200))
    (level,) = virtual_time.run(measure_levels(VirtualLevels(lambda: answer, REQUESTS, None), spec))
    assert level.users == 40 and level.achieved_per_s == pytest.approx(10.0, rel=0.1)


def test_a_closed_loop_of_many_users_with_long_and_short_answers_stays_full() -> None:
    """Users whose requests run out would lower the throughput and the number of requests in flight."""
    draw = random.Random(1)
    outputs = [max(1, round(draw.lognormvariate(4.4, 0.67))) for _ in range(1000)]
    mixed = Requests(REQUESTS.due, REQUESTS.prompts, outputs, REQUESTS.lengths)

    def many_slots(load: Load) -> Outcome:
        limits = Limits(sequences=1000, batched_tokens=10**6, kv_tokens=1e12)
        return simulate(load.due, load.prompts, load.outputs, lambda _: 0.03, limits, closed=load.closed)

    spec = BenchSpec(workload().with_users(200), None, amount=Amount(requests=800, max_window_s=12.0))
    (level,) = virtual_time.run(measure_levels(VirtualLevels(lambda: many_slots, mixed, None), spec))
    assert level.achieved_per_s == pytest.approx(200 / (0.03 * fmean(outputs)), rel=0.12)
    assert not level.failed_guards


def test_a_rehearsal_says_what_a_study_on_other_devices_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_PLAYS", 1)
    spec = TuneSpec(
        "Qwen/Qwen3-8B", inputs.workload("summarize"), inputs.slo("interactive"), engines=("vllm",), schemes=("bf16",),
        budget_s=3600.0, max_trials=6, usd_per_h=2.0,
    )  # fmt: skip
    found = asyncio.run(asyncio.to_thread(rehearse.rehearse, spec, host=host_of(device("h100"), 2)))
    assert found.devices == 2 and len(found.plays) == 1
    assert 0 < found.duration_s.value <= 4200
    assert found.usd.value == pytest.approx(2 * 2.0 * found.duration_s.value / 3600)
    assert found.plays[0].winner and 0.5 < found.plays[0].found <= 1
    assert found.max_rate_per_s.low < found.max_rate_per_s.value < found.max_rate_per_s.high
