"""What fits, how fast, what it costs: against answers that are known, and plays that can be followed by hand."""

import math
from array import array
from collections.abc import Sequence

import pytest

from powerband import engines, plan
from powerband.core.coefficients import Coefficients
from powerband.core.engine import EngineSettings
from powerband.core.model import Model
from powerband.core.plan import Plan, Rejection
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.plan import calibrate, expect, residual_model
from powerband.plan.closed_loop import steady_state
from powerband.plan.options import Lengths, Offer, Option, host_of, options
from powerband.plan.probe import PROBES, ProbeResult
from powerband.plan.simulate import Limits, simulate
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Split, Steps
from powerband.runtime import model_files
from powerband.store import documents

LENGTHS = Lengths(prompt=512, output=128, longest=4096)


def model(name: str) -> Model:
    return model_files.facts(name)


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
    return plan.plan(plan.PlanSpec(model=model(name), workload=workload, slo=slo, offers=offers, **changes))  # type: ignore[arg-type]


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
        plan.PlanSpec(model=model("Qwen/Qwen3-32B"), workload=workload, slo=slo, offers=(offer("h100-sxm", 2),))
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


def steps_of(source: str, scheme: str) -> Steps:
    shape = model(source).shape
    assert shape is not None
    return Steps(shape, next(one for one in plan.all_schemes() if one.name == scheme), Split())


def made(source: str, **truth: float) -> StepTimes:
    coefficients = Coefficients.model_validate({"engine": "vllm", **truth})
    return StepTimes(steps_of(source, "bf16"), plan.device("c7i-8xlarge"), coefficients)


def test_calibrating_finds_the_coefficients_that_made_the_times() -> None:
    truth = made("Qwen/Qwen3-0.6B", bandwidth=0.5, compute=0.2, kv_bandwidth=0.4, attention=0.1, overlap=1,
                 step_s=0.004, sequence_s=0.0005, prompt_s=0.01)  # fmt: skip
    seen = []
    for one in PROBES:
        first = truth(Batch(prefill=one.users * one.prompt, behind=one.prompt / 2, firsts=one.users))
        step = truth(Batch(decodes=one.users, context=one.prompt + one.output / 2))
        seen += [ProbeResult(one, first * noise, step * noise) for noise in (0.9, 1.0, 1.1)]
    fitted = calibrate.fit(truth.steps, truth.device, "vllm", seen, name="x", source="x")
    again = StepTimes(truth.steps, truth.device, fitted)
    for batch in (
        Batch(decodes=1, context=100),
        Batch(decodes=16, context=900),
        Batch(prefill=700, behind=350, firsts=1),
    ):
        assert again(batch) == pytest.approx(truth(batch), rel=0.02)
    assert fitted.tpot.high == pytest.approx(1.1, rel=0.02) and fitted.tpot.low == pytest.approx(1 / 1.1, rel=0.02)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_choice_becomes_knobs_and_the_knobs_the_choice(engine: str) -> None:
    adapter, known = engines.get(engine), model("Qwen/Qwen3-0.6B")
    assert adapter.scheduling is not None
    for kv_format, size in adapter.scheduling.kv_formats.items():
        per_token = size * (known.kv_elements_per_token() or 0)
        choice = EngineSettings(source="x", scheme="", kv_format=kv_format, on_cpu=True, sequences=6,
                                batched_tokens=512, context=1024, kv_bytes=int(6 * 1024 * per_token))  # fmt: skip
        data = {"variant": {"source": "x"}, "engine": engine, "config": adapter.knobs_for(choice)}
        deployment = engines.deployment_type(engine).model_validate(data)
        host = host_of(plan.device("c7i-8xlarge"), 1)
        assert adapter.choice_of(deployment, model=known, host=host) == choice


def test_a_measured_model_on_a_measured_device_is_corrected_and_others_are_not() -> None:
    nvidia = next(one for one in plan.coefficients() if one.name == "vllm-nvidia")
    spreads = {}
    for source, on in (
        ("meta-llama/Meta-Llama-3.1-8B", "h200-sxm"),
        ("Qwen/Qwen3-8B", "h200-sxm"),
        ("Qwen/Qwen3-8B", "l4"),
    ):
        times = StepTimes(steps_of(source, "fp8-dynamic"), plan.device(on), nvidia)
        better = residual_model.corrected("vllm", times, steady_state(times, users=16, prompt=1000, output=200))
        batch = Batch(decodes=16, context=1100)
        assert (better(batch) == times(batch)) == (on == "l4")
        assert 0.5 < better(batch) / times(batch) < 2
        spreads[source, on] = better.coefficients.tpot.high / better.coefficients.tpot.low
    known, new, elsewhere = spreads.values()
    assert known < new < elsewhere


def test_users_wait_for_each_others_prompts() -> None:
    times = made("Qwen/Qwen3-0.6B")
    alone, crowd = (steady_state(times, users=users, prompt=500, output=100) for users in (1, 16))
    assert crowd.ttft_s > 1.2 * alone.ttft_s and crowd.tpot_s > 1.2 * alone.tpot_s
    assert steady_state(times, users=1, prompt=500, output=100, known=400).ttft_s < 0.9 * alone.ttft_s


def test_a_number_format_that_no_scheme_describes_is_not_expected_to_do_anything() -> None:
    known = model("Qwen/Qwen3-0.6B").model_copy(update={"numbers": "q9_x", "format": "gguf"})
    data = {"variant": {"source": "x"}, "engine": "llamacpp"}
    deployment = engines.deployment_type("llamacpp").model_validate(data)
    assert expect.deployed(deployment, model=known, host=host_of(plan.device("c7i-8xlarge"), 1), known=()) is None


def test_fewer_cores_are_expected_to_do_less() -> None:
    known, host = model("Qwen/Qwen3-0.6B"), host_of(plan.device("c7i-8xlarge"), 1)
    half = len(host.cores) // 2

    def seconds(**config: int) -> float:
        data = {"variant": {"source": "x"}, "engine": "vllm", "config": config}
        deployment = engines.deployment_type("vllm").model_validate(data)
        on = expect.deployed(deployment, model=known, host=host, known=())
        assert on is not None
        return on.times(Batch(decodes=1, context=100))

    some = seconds(VLLM_CPU_NUM_OF_RESERVED_CPU=half)
    assert seconds(VLLM_CPU_NUM_OF_RESERVED_CPU=0) < seconds() < some


@pytest.mark.parametrize(("name", "quicker"), [("h100-sxm", True), ("c7i-8xlarge", False)])
def test_a_narrow_kv_cache_saves_time_where_it_is_multiplied_as_it_is(name: str, quicker: bool) -> None:
    shape, device = model("Qwen/Qwen3-0.6B").shape, plan.device(name)
    assert shape is not None

    def seconds(kv_bytes: float) -> float:
        steps = Steps(shape, plan.scheme("bf16"), Split(), kv_bytes=kv_bytes)
        return StepTimes(steps, device, Coefficients(engine="vllm"))(Batch(decodes=64, context=2000))

    wide, narrow = seconds(2.0), seconds(1.0)
    assert narrow < 0.8 * wide if quicker else narrow == pytest.approx(wide)
