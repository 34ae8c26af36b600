"""What fits, how fast, what it costs: against answers that are known, and plays that can be followed by hand."""

import math
from array import array
from collections.abc import Sequence

import pytest

from powerband import plan
from powerband.core.coefficients import Coefficients
from powerband.core.model import Model
from powerband.core.plan import Plan, Rejection
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.plan import calibrate
from powerband.plan.calibrate import Seen
from powerband.plan.options import Lengths, Offer, Option, options
from powerband.plan.simulate import Limits, simulate
from powerband.plan.times import StepTimes
from powerband.plan.work import Batch, Split, Steps
from powerband.runtime import weights
from powerband.store import documents

LENGTHS = Lengths(prompt=512, output=128, longest=4096)


def model(name: str) -> Model:
    return weights.facts(name)


def offer(name: str, count: int) -> Offer:
    device = plan.device(name)
    return Offer(device, count, device.price.usd_per_h)


def found(name: str, on: Offer, *schemes: str) -> list[Option | Rejection]:
    chosen = [one for one in plan.all_schemes() if one.name in schemes]
    return list(options(model(name), on, LENGTHS, chosen, wanted_engine="vllm"))


def test_llama_70b_fits_one_h100_in_four_bits_and_not_in_sixteen() -> None:
    (rejected,) = found("meta-llama/Meta-Llama-3.1-70B", offer("h100-sxm", 1), "bf16")
    assert isinstance(rejected, Rejection) and "of weights" in rejected.reason and "bits or less" in rejected.remedy
    fits = found("meta-llama/Meta-Llama-3.1-70B", offer("h100-sxm", 1), "w4a16-awq")
    assert fits and all(isinstance(one, Option) for one in fits)


def test_a_device_without_a_format_is_told_so() -> None:
    (rejected,) = found("meta-llama/Meta-Llama-3.1-8B", offer("a100-80", 1), "fp8-dynamic")
    assert isinstance(rejected, Rejection) and "cannot" in rejected.reason


def planned(name: str, *offers: Offer, **changes: object) -> Plan:
    workload, slo = documents.find("workload", "chat"), documents.find("slo", "interactive")
    assert isinstance(workload, Workload) and isinstance(slo, SLO)
    return plan.plan(plan.Order(model=model(name), workload=workload, slo=slo, offers=offers, **changes))  # type: ignore[arg-type]


def test_four_replicas_beat_one_that_is_cut_in_four_where_one_device_is_enough() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("h100-sxm", 4), schemes=("bf16",), engine="vllm")
    per_device = {
        one.split: one.goodput_per_s.value / one.devices for one in answer.candidates if one.kv_format == "auto"
    }
    assert per_device["1 device"] > 1.1 * per_device["tp4"]
    assert answer.candidates[0].devices == 1


def test_a_loose_promise_never_costs_more() -> None:
    slo = documents.find("slo", "batch")
    assert isinstance(slo, SLO)
    strict = planned("Qwen/Qwen3-32B", offer("h100-sxm", 2))
    workload = documents.find("workload", "chat")
    assert isinstance(workload, Workload)
    loose = plan.plan(
        plan.Order(model=model("Qwen/Qwen3-32B"), workload=workload, slo=slo, offers=(offer("h100-sxm", 2),))
    )
    costs = [one.candidates[0].usd_per_1m_tokens for one in (loose, strict)]
    assert costs[0] and costs[1] and costs[0].value <= costs[1].value * 1.05


def test_a_plan_is_a_document_that_reads_back_and_its_first_choice_can_be_started() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("l4", 1), offer("c7i-8xlarge", 1), load_per_s=10.0)
    assert documents.parse(answer.to_json(), source="x") == answer
    for one in answer.candidates:
        assert one.replicas == math.ceil(10 / one.goodput_per_s.value)
        deployment = documents.document_type("deployment", one.deployment, source="x")
        assert deployment.validate_data(one.deployment, source="x", lines={}).kind == "deployment"


def clock(batch: Batch) -> float:
    """A step takes a second, a prompt token a hundredth, an answer a tenth."""
    return 1.0 + batch.prefill / 100 + batch.decodes / 10


def test_one_request_alone() -> None:
    played = simulate([0.0], [100], [3], clock, Limits(8, 1000, 1e9))
    assert list(played.ttft) == [2.0]  # one step of 100 prompt tokens
    assert list(played.e2e) == pytest.approx([2.0 + 2 * 1.1])
    assert list(played.tpot) == pytest.approx([1.1])


def test_a_long_prompt_is_cut_into_chunks() -> None:
    played = simulate([0.0], [250], [1], clock, Limits(8, 100, 1e9))
    assert list(played.ttft) == pytest.approx([2.0 + 2.0 + 1.5])


def test_a_second_request_waits_for_the_step_under_way_and_shares_the_next() -> None:
    played = simulate([0.0, 0.5], [100, 100], [3, 1], clock, Limits(8, 1000, 1e9))
    assert list(played.ttft) == pytest.approx([2.0, 2.0 + 2.1 - 0.5])


def test_a_full_cache_makes_requests_wait() -> None:
    free = simulate([0.0, 0.0], [100, 100], [50, 50], clock, Limits(8, 1000, 1e9))
    full = simulate([0.0, 0.0], [100, 100], [50, 50], clock, Limits(8, 1000, 200))
    assert full.ttft[1] > free.ttft[1] + 40
    assert simulate([0.0], [100], [50], clock, Limits(8, 1000, 100)).refused == 1


def test_a_known_prefix_is_not_computed_again() -> None:
    assert simulate([0.0], [100], [1], clock, Limits(8, 1000, 1e9), known_share=0.5).ttft[0] == pytest.approx(1.5)


def test_steps_taken_together_are_steps_taken_one_by_one() -> None:
    due = array("d", (number * 0.7 for number in range(60)))
    prompts, outputs = [40 + 13 * (number % 7) for number in range(60)], [5 + number % 11 for number in range(60)]
    played = simulate(due, prompts, outputs, clock, Limits(4, 64, 1e9))
    assert len(played.e2e) == 60
    assert sum(played.e2e) / 60 == pytest.approx(_step_by_step(due, prompts, outputs, 4, 64), rel=1e-6)


def _step_by_step(due: Sequence[float], prompts: list[int], outputs: list[int], slots: int, budget: int) -> float:
    """The same scheduler, written the slow way."""
    waiting, now = list(range(len(due))), 0.0
    active: list[int] = []
    ends: dict[int, float] = {}
    left, out = dict(enumerate(prompts)), dict.fromkeys(range(len(due)), 0)
    while waiting or active:
        while waiting and len(active) < slots and due[waiting[0]] <= now:
            active.append(waiting.pop(0))
        if not active:
            now = due[waiting[0]]
            continue
        writing = [one for one in active if left[one] == 0]
        room, chunk, firsts = budget - len(writing), 0, []
        for one in active:
            if left[one] and room > 0:
                part = min(room, left[one])
                left[one], room, chunk = left[one] - part, room - part, chunk + part
                firsts += [one] if left[one] == 0 else []
        now += clock(Batch(prefill=chunk, decodes=len(writing)))
        for one in [*writing, *firsts]:
            out[one] += 1
            if out[one] == outputs[one]:
                ends[one] = now
                active.remove(one)
    return sum(ends[one] - due[one] for one in ends) / len(ends)


def test_calibrating_finds_the_coefficients_that_made_the_times() -> None:
    shape = model("Qwen/Qwen3-0.6B").shape
    assert shape is not None
    steps = Steps(shape, next(one for one in plan.all_schemes() if one.name == "bf16"), Split())
    device = plan.device("c7i-8xlarge")
    truth = Coefficients(engine="vllm", bandwidth=0.5, compute=0.2, kv_bandwidth=0.4, attention=0.1, overlap=1,
                         step_s=0.004, sequence_s=0.0005, request_s=0.01)  # fmt: skip
    clock = StepTimes(steps, device, truth)
    seen = []
    for probe in calibrate.PROBES:
        solved = [truth.step_s, 2, 5, 2.5, 10, truth.sequence_s, truth.request_s]
        made = {metric: sum(a * b for a, b in zip(row, solved, strict=True))
                for metric, row, _ in calibrate._observations(steps, device, Seen(probe, 1, 1, 1))}  # fmt: skip
        seen.append(Seen(probe, made.get("ttft", 99.0), made["tpot"], 5))
    alone = clock(Batch(prefill=900, behind=450, firsts=1)) + truth.request_s
    assert alone == pytest.approx(next(one.ttft_s for one in seen if one.probe.prompt == 900), rel=1e-6)
    fitted = calibrate.fit(steps, device, "vllm", seen, name="x", source="x")
    again = StepTimes(steps, device, fitted)
    for batch in (
        Batch(decodes=1, context=100),
        Batch(decodes=16, context=900),
        Batch(prefill=700, behind=350, firsts=1),
    ):
        assert again(batch) == pytest.approx(clock(batch), rel=0.02)
