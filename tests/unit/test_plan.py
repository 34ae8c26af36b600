"""The planner: known answers, simulations that can be checked by hand, device names, and the report."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

import powerband.plan as plan
from powerband import catalog, engines
from powerband.core.coefficients import Coefficients
from powerband.core.engine import EngineSettings
from powerband.core.model import Model
from powerband.core.plan import Candidate, Plan, Rejection
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.plan import calibrate, expect, predict, residual_model
from powerband.plan.closed_loop import steady_state
from powerband.plan.options import Lengths, Offer, Option, host_of, options
from powerband.plan.probe import PROBES, ProbeResult
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Split, Steps
from powerband.reports import plan as report
from powerband.runtime import model_files
from powerband.store import documents, schemes
from powerband.store.schemes import all_schemes

LENGTHS = Lengths(prompt=512, output=128, max_tokens=4096)


def model(name: str) -> Model:
    return model_files.architecture(name)


def offer(name: str, count: int) -> Offer:
    device = plan.device(name)
    return Offer(device, count, device.price.usd_per_h)


def found(name: str, on: Offer, *schemes: str, lengths: Lengths = LENGTHS) -> list[Option | Rejection]:
    chosen = [one for one in all_schemes() if one.name in schemes]
    return list(options(model(name), on, lengths, chosen, wanted_engine="vllm"))


def test_llama_70b_fits_one_h100_in_four_bits_and_not_in_sixteen() -> None:
    (rejected,) = found("meta-llama/Meta-Llama-3.1-70B", offer("h100-sxm", 1), "bf16")
    assert isinstance(rejected, Rejection) and "of weights" in rejected.reason and "bits or less" in rejected.remedy
    fits = found("meta-llama/Meta-Llama-3.1-70B", offer("h100-sxm", 1), "w4a16-awq")
    assert fits and all(isinstance(one, Option) for one in fits)


def test_a_scheme_that_is_documented_not_to_run_is_rejected_with_the_source() -> None:
    (rejected,) = found("meta-llama/Meta-Llama-3.1-8B", offer("b200-sxm", 1), "w8a8-int8")
    assert isinstance(rejected, Rejection) and "not supported on NVIDIA Blackwell" in rejected.reason
    assert "https://" in rejected.reason


def test_a_weight_only_scheme_saves_memory_but_computes_in_16_bits() -> None:
    def steps(device: str) -> Steps:
        first = found("meta-llama/Meta-Llama-3.1-8B", offer(device, 1), "fp8-dynamic")[0]
        assert isinstance(first, Option)
        return first.steps

    ampere, hopper = steps("a100-80"), steps("h100-sxm")
    assert ampere.weight_bytes == hopper.weight_bytes
    assert ampere.scheme.compute_dtype({"fp8": 1}) == "bf16" and hopper.scheme.compute_dtype({"fp8": 1}) == "fp8"


def test_of_schemes_with_equal_bits_the_native_one_is_offered() -> None:
    options = found("meta-llama/Meta-Llama-3.1-8B", offer("a100-80", 1), "fp8-dynamic", "w8a8-int8")
    assert {one.scheme.name for one in options if isinstance(one, Option)} == {"w8a8-int8"}
    options = found("meta-llama/Meta-Llama-3.1-8B", offer("rtx-5090", 1), "fp8-dynamic", "w8a8-int8")
    assert {one.scheme.name for one in options if isinstance(one, Option)} == {"fp8-dynamic"}


def test_kv_formats_that_a_device_lacks_are_rejected() -> None:
    options = found("Qwen/Qwen3-0.6B", offer("t4", 1), "bf16")
    assert {one.kv_format for one in options if isinstance(one, Option)} == {"auto"}
    assert [one.what for one in options if isinstance(one, Rejection)] == ["fp8 KV"]


def test_what_is_not_documented_is_offered_last_and_marked() -> None:
    unknown = plan.device("rtx-4090").model_copy(update={"family": None})
    found = planned("Qwen/Qwen3-8B", Offer(unknown, 1, 0.01), offer("h100-sxm", 1))
    documented = [one.documented for one in found.candidates]
    assert documented == sorted(documented, reverse=True) and set(documented) == {True, False}
    assert found.candidates[-1].usd_per_1m_tokens.value < found.candidates[0].usd_per_1m_tokens.value
    assert "not documented for this device" in rendered(found)


def test_the_first_choice_keeps_the_quality_floor() -> None:
    def first(floor: str) -> Candidate:
        found = documents.find("quality", floor)
        return planned("meta-llama/Meta-Llama-3.1-8B", offer("m4-max", 1), floor=found).candidates[0]

    lenient, strict = first("lenient"), first("strict")
    assert lenient.quality and strict.quality
    assert schemes.scheme(strict.scheme).linear_bits > schemes.scheme(lenient.scheme).linear_bits
    assert lenient.usd_per_1m_tokens.value < strict.usd_per_1m_tokens.value


def planned(name: str, *offers: Offer, **changes: object) -> Plan:
    workload, slo = documents.find("workload", "chat"), documents.find("slo", "interactive")
    assert isinstance(workload, Workload) and isinstance(slo, SLO)
    return plan.plan(plan.PlanSpec(model=model(name), workload=workload, slo=slo, offers=offers, **changes))  # type: ignore[arg-type]


def test_the_context_holds_the_last_turn_of_a_session() -> None:
    lengths = {"prompt": {"shape": "fixed", "tokens": 500}, "output": {"shape": "fixed", "tokens": 100}}
    arrivals = {"process": "poisson", "rate_per_s": 1}
    session = Workload.model_validate({"arrivals": arrivals, **lengths, "turns": {"count": 8}})
    requests = plan.sample_requests(session, model("Qwen/Qwen3-8B"))
    assert requests.lengths.max_tokens >= 8 * 600 and requests.lengths.prompt == pytest.approx(500 + 3.5 * 600)
    assert len(requests.due) == len(requests.prompts) and requests.due[-1] == pytest.approx(len(requests.due), rel=0.1)


def test_requests_that_exceed_the_context_of_the_model_are_refused() -> None:
    coding, llama = documents.find("workload", "coding-agent"), model("meta-llama/Meta-Llama-3.1-8B")
    assert isinstance(coding, Workload)
    assert plan.sample_requests(coding, llama.model_copy(update={"context_tokens": None})).lengths.max_tokens > 200_000
    with pytest.raises(InputError, match=r"longer than the model's context of 131072 tokens"):
        plan.sample_requests(coding, llama.model_copy(update={"context_tokens": 131_072}))


def test_lora_adapters_take_memory_for_every_tenant() -> None:
    """A rank of 16 on all linear layers of Llama 3.1 8B has 41,943,040 parameters, as PEFT prints them."""
    llama = model("meta-llama/Meta-Llama-3.1-8B")
    assert llama.shape and llama.shape.adapter_elements(16) == 41_943_040
    without, tenants = Lengths(500, 100, 2048), Lengths(500, 100, 2048, adapters=64, adapter_rank=16)
    plain, multi = (found("meta-llama/Meta-Llama-3.1-8B", offer("l4", 1), "fp8-dynamic", lengths=one)[0]
                    for one in (without, tenants))  # fmt: skip
    assert isinstance(plain, Option) and isinstance(multi, Option)
    assert plain.memory.kv_cache - multi.memory.kv_cache == pytest.approx(64 * 2 * 41_943_040, rel=0.01)
    assert multi.deployment()["config"]["max_loras"] == 64
    deployment = engines.deployment_of({name: one for name, one in multi.deployment().items() if name != "powerband"})
    checked = engines.get("vllm").footprint(deployment, model=llama, host=host_of(multi.offer.device, 1))
    assert checked.overhead_bytes == multi.memory.overhead


def test_four_replicas_beat_one_split_in_four_if_one_device_is_enough() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("h100-sxm", 4), schemes=("bf16",), engine="vllm")
    per_device = {
        one.split: one.goodput_per_s.value / one.devices for one in answer.candidates if one.kv_format == "auto"
    }
    assert per_device["1 device"] > 1.1 * per_device["tp4"]
    assert answer.candidates[0].devices == 1


def test_a_loose_slo_never_costs_more() -> None:
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


def test_a_plan_reads_back_and_its_deployments_are_valid() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("l4", 1), offer("c7i-8xlarge", 1), load_per_s=10.0)
    assert documents.parse(answer.to_json(), source="x") == answer
    for one in answer.candidates:
        assert one.replicas == math.ceil(10 / one.goodput_per_s.value)
        deployment = documents.document_type("deployment", one.deployment, source="x")
        assert deployment.validate_data(one.deployment, source="x", lines={}).kind == "deployment"


def clock(batch: Batch) -> float:
    """A step takes 1 s, plus 0.01 s for each prefill token and 0.1 s for each decoding sequence."""
    return 1.0 + batch.prefill_tokens / 100 + batch.decodes / 10


def test_one_request() -> None:
    outcome = simulate([0.0], [100], [3], clock, Limits(8, 1000, 1e9))
    assert list(outcome.ttft) == [2.0]  # one step of 100 prompt tokens
    assert list(outcome.e2e) == pytest.approx([2.0 + 2 * 1.1])
    assert list(outcome.tpot) == pytest.approx([1.1])


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    outcome = simulate([0.0], [250], [1], clock, Limits(8, 100, 1e9))
    assert list(outcome.ttft) == pytest.approx([2.0 + 2.0 + 1.5])


def test_a_second_request_waits_for_the_current_step_and_shares_the_next() -> None:
    outcome = simulate([0.0, 0.5], [100, 100], [3, 1], clock, Limits(8, 1000, 1e9))
    assert list(outcome.ttft) == pytest.approx([2.0, 2.0 + 2.1 - 0.5])


def test_a_full_cache_makes_requests_wait() -> None:
    free = simulate([0.0, 0.0], [100, 100], [50, 50], clock, Limits(8, 1000, 1e9))
    full = simulate([0.0, 0.0], [100, 100], [50, 50], clock, Limits(8, 1000, 200))
    assert full.ttft[1] > free.ttft[1] + 40
    assert simulate([0.0], [100], [50], clock, Limits(8, 1000, 100)).rejected == 1


def test_a_cached_prefix_is_not_prefilled_again() -> None:
    assert simulate([0.0], [100], [1], clock, Limits(8, 1000, 1e9), cached_share=0.5).ttft[0] == pytest.approx(1.5)


def test_steps_computed_at_once_equal_steps_computed_one_by_one() -> None:
    due = array("d", (number * 0.7 for number in range(60)))
    prompts, outputs = [40 + 13 * (number % 7) for number in range(60)], [5 + number % 11 for number in range(60)]
    outcome = simulate(due, prompts, outputs, clock, Limits(4, 64, 1e9))
    assert len(outcome.e2e) == 60
    assert sum(outcome.e2e) / 60 == pytest.approx(_step_by_step(due, prompts, outputs, 4, 64), rel=1e-6)


def _step_by_step(due: Sequence[float], prompts: list[int], outputs: list[int], slots: int, budget: int) -> float:
    """Return the mean latency of the same scheduler, simulated step by step."""
    waiting, now = list(range(len(due))), 0.0
    active: list[int] = []
    ends: dict[int, float] = {}
    remaining, out = dict(enumerate(prompts)), dict.fromkeys(range(len(due)), 0)
    while waiting or active:
        while waiting and len(active) < slots and due[waiting[0]] <= now:
            active.append(waiting.pop(0))
        if not active:
            now = due[waiting[0]]
            continue
        decoding = [one for one in active if remaining[one] == 0]
        free, chunk, finished = budget - len(decoding), 0, []
        for one in active:
            if remaining[one] and free > 0:
                part = min(free, remaining[one])
                remaining[one], free, chunk = remaining[one] - part, free - part, chunk + part
                finished += [one] if remaining[one] == 0 else []
        now += clock(Batch(prefill_tokens=chunk, decodes=len(decoding)))
        for one in [*decoding, *finished]:
            out[one] += 1
            if out[one] == outputs[one]:
                ends[one] = now
                active.remove(one)
    return sum(ends[one] - due[one] for one in ends) / len(ends)


def _prefill(tokens: float, context: float, prompts: float) -> Batch:
    return Batch(prefill_tokens=tokens, prefill_context=context, finished_prompts=prompts)


def steps_of(source: str, scheme: str) -> Steps:
    shape = model(source).shape
    assert shape is not None
    return Steps(shape, next(one for one in all_schemes() if one.name == scheme), Split())


def step_times(source: str, **truth: float) -> StepTimes:
    coefficients = Coefficients.model_validate({"engine": "vllm", **truth})
    return StepTimes(steps_of(source, "bf16"), plan.device("c7i-8xlarge"), coefficients)


def test_calibration_recovers_the_coefficients_behind_the_times() -> None:
    truth = step_times("Qwen/Qwen3-0.6B", bandwidth=0.5, compute=0.2, kv_bandwidth=0.4, attention=0.1, overlap=1,
                       step_s=0.004, sequence_s=0.0005, prompt_s=0.01)  # fmt: skip
    results = []
    for one in PROBES:
        first = truth(_prefill(one.concurrency * one.prompt, one.prompt / 2, one.concurrency))
        step = truth(Batch(decodes=one.concurrency, decode_context=one.prompt + one.output / 2))
        results += [ProbeResult(one, first * noise, step * noise) for noise in (0.9, 1.0, 1.1)]
    fitted = calibrate.fit(truth.steps, truth.device, "vllm", results, name="x", source="x")
    again = StepTimes(truth.steps, truth.device, fitted)
    for batch in (
        Batch(decodes=1, decode_context=100),
        Batch(decodes=16, decode_context=900),
        _prefill(700, 350, 1),
    ):
        assert again(batch) == pytest.approx(truth(batch), rel=0.02)
    assert fitted.tpot.high == pytest.approx(1.1, rel=0.02) and fitted.tpot.low == pytest.approx(1 / 1.1, rel=0.02)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_settings_become_knobs_and_knobs_become_the_same_settings(engine: str) -> None:
    adapter, known = engines.get(engine), model("Qwen/Qwen3-0.6B")
    assert adapter.scheduling is not None
    for kv_format, size in adapter.scheduling.kv_formats.items():
        per_token = size * (known.kv_elements_per_token() or 0)
        settings = EngineSettings(source="x", scheme="", kv_format=kv_format, on_cpu=True, sequences=6,
                                  batched_tokens=512, context=1024, kv_bytes=int(6 * 1024 * per_token))  # fmt: skip
        data = {"variant": {"source": "x"}, "engine": engine, "config": adapter.knobs_for(settings)}
        deployment = engines.deployment_type(engine).model_validate(data)
        host = host_of(plan.device("c7i-8xlarge"), 1)
        assert adapter.settings_of(deployment, model=known, host=host) == settings


def test_only_predictions_on_measured_devices_are_corrected() -> None:
    nvidia = next(one for one in plan.coefficients() if one.name == "vllm-nvidia")
    spreads = {}
    for source, on in (
        ("meta-llama/Meta-Llama-3.1-8B", "h200-sxm"),
        ("Qwen/Qwen3-8B", "h200-sxm"),
        ("Qwen/Qwen3-8B", "l4"),
    ):
        times = StepTimes(steps_of(source, "fp8-dynamic"), plan.device(on), nvidia)
        better = residual_model.corrected("vllm", times, steady_state(times, concurrency=16, prompt=1000, output=200))
        batch = Batch(decodes=16, decode_context=1100)
        assert (better(batch) == times(batch)) == (on == "l4")
        assert 0.5 < better(batch) / times(batch) < 2
        spreads[source, on] = better.coefficients.tpot.high / better.coefficients.tpot.low
    known, new, elsewhere = spreads.values()
    assert known < new < elsewhere


def test_requests_wait_for_the_prefill_of_others() -> None:
    times = step_times("Qwen/Qwen3-0.6B")
    alone, loaded = (steady_state(times, concurrency=n, prompt=500, output=100) for n in (1, 16))
    assert loaded.ttft_s > 1.2 * alone.ttft_s and loaded.tpot_s > 1.2 * alone.tpot_s
    assert steady_state(times, concurrency=1, prompt=500, output=100, cached=400).ttft_s < 0.9 * alone.ttft_s


def test_nothing_is_expected_of_weights_that_no_scheme_describes() -> None:
    known = model("Qwen/Qwen3-0.6B").model_copy(update={"weight_format": "q9_x", "format": "gguf"})
    data = {"variant": {"source": "x"}, "engine": "llamacpp"}
    deployment = engines.deployment_type("llamacpp").model_validate(data)
    assert expect.server_for(deployment, model=known, host=host_of(plan.device("c7i-8xlarge"), 1), known=()) is None


def test_fewer_cores_are_expected_to_be_slower() -> None:
    known, host = model("Qwen/Qwen3-0.6B"), host_of(plan.device("c7i-8xlarge"), 1)
    half = len(host.cores) // 2

    def seconds(**config: int) -> float:
        data = {"variant": {"source": "x"}, "engine": "vllm", "config": config}
        deployment = engines.deployment_type("vllm").model_validate(data)
        server = expect.server_for(deployment, model=known, host=host, known=())
        assert server is not None
        return server.times(Batch(decodes=1, decode_context=100))

    some = seconds(VLLM_CPU_NUM_OF_RESERVED_CPU=half)
    assert seconds(VLLM_CPU_NUM_OF_RESERVED_CPU=0) < seconds() < some


@pytest.mark.parametrize(("name", "faster"), [("h100-sxm", True), ("c7i-8xlarge", False)])
def test_a_narrow_kv_cache_saves_time_on_a_gpu_but_not_on_a_cpu(name: str, faster: bool) -> None:
    shape, device = model("Qwen/Qwen3-0.6B").shape, plan.device(name)
    assert shape is not None

    def seconds(kv_bytes: float) -> float:
        steps = Steps(shape, schemes.scheme("bf16"), Split(), kv_bytes=kv_bytes)
        return StepTimes(steps, device, Coefficients(engine="vllm"))(Batch(decodes=64, decode_context=2000))

    wide, narrow = seconds(2.0), seconds(1.0)
    assert narrow < 0.8 * wide if faster else narrow == pytest.approx(wide)


def rendered(answer: Plan, *, why: bool = False) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        for part in report.tables(answer, why=why):
            console.print(part)
    return captured.get()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("h100sxm5", "h100-sxm"),
        ("h100-pcie", "h100-pcie"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("h200", "h200-sxm"),
        ("a100", "a100-80"),
        ("A100_40GB", "a100-40"),
        ("b200", "b200-sxm"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("mi300", "mi300x"),
        ("AMD-MI300X", "mi300x"),
        ("nvidia-l4", "l4"),
        ("c7i.8xlarge", "c7i-8xlarge"),
        ("gh200", "gh200"),
    ],
)
def test_a_device_is_found_by_the_names_that_people_type(typed: str, name: str) -> None:
    assert plan.device(typed).name == name


@pytest.mark.parametrize(
    ("typed", "name"), [("h20O", "h200-sxm"), ("h1000", "h100-sxm"), ("rtx-409", "rtx-4090"), ("mi30x", "mi300x")]
)
def test_a_mistyped_device_suggests_the_closest_name_or_alias(typed: str, name: str) -> None:
    with pytest.raises(InputError, match=f"there is no device '{typed}'.*Did you mean '{name}'\\?"):
        plan.device(typed)


def test_every_name_and_alias_belongs_to_one_device() -> None:
    for name in catalog.names("device"):
        found = plan.device(name)
        names = (name, *found.aliases)
        for typed in (*names, *found.driver_names, *(f"{found.vendor} {one}".upper() for one in names)):
            assert plan.device(typed).name == name


def test_the_report_names_the_device_that_was_taken_for_an_alias() -> None:
    device = plan.device("h100")
    offered = Offer(device, 2, device.price.usd_per_h, requested_as="h100")
    text = rendered(planned("meta-llama/Meta-Llama-3.1-8B", offered, schemes=("bf16",), engine="vllm"))
    assert "devices: 2 x h100-sxm (NVIDIA H100 SXM 80 GB), taken for 'h100'" in text


def test_without_a_load_the_plan_states_what_all_offered_devices_sustain() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("h100-sxm", 6), schemes=("bf16",), engine="vllm")
    assert {one.devices for one in answer.candidates} == {1, 2, 4}
    for one in answer.candidates:
        replicas = {1: 6, 2: 3, 4: 1}[one.devices]
        assert one.fleet_replicas == replicas and one.fleet_per_s is not None
        assert one.fleet_per_s.value == pytest.approx(replicas * one.goodput_per_s.value)
        assert one.fleet_per_s.low == pytest.approx(replicas * one.goodput_per_s.low)
        assert one.fleet_usd_per_h == pytest.approx(replicas * one.usd_per_h)
    first = answer.candidates[0]
    assert first.fleet_per_s is not None
    head, row = (line.split() for line in rendered(answer).splitlines() if line.startswith(("on ", "h100-sxm ")))
    assert head[-2] == "all/s" and row[-2] == f"{first.fleet_per_s.value:,.0f}"
    assert "all offered h100-sxm together: 6 replicas" in rendered(answer)


def test_with_a_load_the_plan_states_what_the_load_needs() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("h100-sxm", 2), schemes=("bf16",), load_per_s=500.0)
    assert all(one.fleet_replicas is None and one.fleet_per_s is None for one in answer.candidates)
    assert "need" in rendered(answer) and "together" not in rendered(answer)


def test_a_rejection_names_its_remedy_in_a_complete_sentence() -> None:
    answer = planned("meta-llama/Meta-Llama-3.1-8B", offer("b200-sxm", 1), schemes=("bf16", "w8a8-int8"))
    text = rendered(answer, why=True)
    assert "not supported on NVIDIA Blackwell for servers (SM100) (from compute capability 10.0)" in text
    assert "Use another scheme." in text
    assert "take" not in text


def test_a_plan_with_an_unreadable_architecture_is_refused() -> None:
    unknown = Model(source="somewhere/else")
    workload, slo = documents.find("workload", "chat"), documents.find("slo", "interactive")
    assert isinstance(workload, Workload) and isinstance(slo, SLO)
    with pytest.raises(InputError, match="cannot read the model's architecture from somewhere/else"):
        plan.plan(plan.PlanSpec(model=unknown, workload=workload, slo=slo, offers=(offer("l4", 1),)))


def test_files_with_keys_of_earlier_versions_are_readable() -> None:
    old = {"engine": "vllm", "apart": True, "batches": {1: 1.1}, "compute_in": {"fp8": 0.5}, "exchange": 0.1,
           "experts": 0.2, "link": 0.3, "mixing": 0.4, "queue": 0.5, "queue_power": 0.6, "round_s": 0.7,
           "traffic": 0.8, "under_way": 0.9, "unpacking": 1.0, "ttft": {"low": 0.5, "high": 2, "of": 7}}  # fmt: skip
    found = Coefficients.model_validate(old)
    assert found.separate_prefill_decode and found.batch_size_factors == {1: 1.1}
    assert found.compute_by_format == {"fp8": 0.5}
    assert (found.all_to_all_bandwidth, found.experts_compute, found.all_reduce_bandwidth) == (0.1, 0.2, 0.3)
    assert (found.prefill_interference, found.queue_factor, found.queue_exponent) == (0.4, 0.5, 0.6)
    assert (found.collective_s, found.mixed_load_factor, found.steps_before_prefill) == (0.7, 0.8, 0.9)
    assert (found.weight_only_compute, found.ttft.points) == (1.0, 7)
    candidate = planned("meta-llama/Meta-Llama-3.1-8B", offer("l4", 1), schemes=("bf16",)).candidates[0]
    data = candidate.model_dump(mode="json")
    data |= {"known": data.pop("basis"), "priced": data.pop("price_source"), "bound_by": data.pop("limited_by")}
    data["memory"]["longest"] = data["memory"].pop("max_sequence_tokens")
    assert Candidate.model_validate(data) == candidate


def server_of(**coefficients: float) -> predict.Server:
    """Return a replica of a small model on a CPU server."""
    times = step_times("Qwen/Qwen3-0.6B", **coefficients)
    return predict.Server(times, Limits(sequences=64, batched_tokens=2048, kv_tokens=200_000))


def sampled(count: int = 300) -> predict.Requests:
    """Return requests of different lengths, one per second."""
    prompts, outputs = ([20 + 37 * n % 400 for n in range(count)], [8 + 11 * n % 120 for n in range(count)])
    return predict.Requests([float(n) for n in range(count)], prompts, outputs, LENGTHS)


FLOWING = SLO.model_validate({"ttft": {"p95": 3.0}, "tpot": {"p90": 0.03}})


def test_a_simulation_that_ends_early_gives_the_verdict_of_the_whole_one() -> None:
    server, requests = server_of(), sampled()
    verdicts = []
    for rate in (0.2, 1.0, 3.0, 6.0, 12.0, 50.0, 200.0):
        whole = predict.outcome_at(server, requests, rate)
        cut = predict.outcome_at(server, requests, rate, slo=FLOWING)
        verdicts.append(predict.meets(FLOWING, whole, server.times.coefficients))
        assert predict.meets(FLOWING, cut, server.times.coefficients) == verdicts[-1]
    assert True in verdicts and False in verdicts


def test_a_search_that_begins_near_the_result_finds_it_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    server, requests, rounds = server_of(), sampled(), list[float]()
    estimate, original = predict.fluid_estimate(server, requests.lengths, FLOWING), predict.outcome_at

    def counted(server: predict.Server, requests: predict.Requests, rate_per_s: float, **more: Any) -> Outcome:
        rounds.append(rate_per_s)
        return original(server, requests, rate_per_s, **more)

    monkeypatch.setattr(predict, "outcome_at", counted)
    first = predict.max_rate(server, requests, FLOWING, estimate=estimate)
    assert first is not None
    count = len(rounds)
    share = first.rate_per_s / estimate.rate_per_s
    again = predict.max_rate(server, requests, FLOWING, estimate=estimate, start_share=share)
    assert again is not None and again.rate_per_s == pytest.approx(first.rate_per_s, rel=0.05)
    assert len(rounds) - count < count or share <= 0.75


def test_slower_tails_under_mixed_load_lower_the_max_rate() -> None:
    requests, rates = sampled(), []
    for tail in (1.0, 1.75):
        server = server_of(tpot_tail=tail)
        estimate = predict.fluid_estimate(server, requests.lengths, FLOWING)
        found = predict.max_rate(server, requests, FLOWING, estimate=estimate)
        assert found is not None
        rates.append(found.rate_per_s)
        interval = predict.max_rate_interval(server, requests, FLOWING, found.rate_per_s)
        assert interval.low <= interval.value <= interval.high
    assert rates[1] < 0.9 * rates[0]


def test_no_rate_exceeds_the_throughput_of_a_full_engine() -> None:
    loose = SLO.model_validate({"ttft": {"p95": 60.0}, "tpot": {"p90": 10.0}})
    server, requests = server_of(), sampled()
    found = predict.max_rate(server, requests, loose, estimate=predict.fluid_estimate(server, requests.lengths, loose))
    due, prompts, outputs = requests.first(3000)
    at_once = simulate(
        [0.0] * len(due), prompts, outputs, server.times, server.limits, cached_share=LENGTHS.cached_share
    )
    throughput_per_s = len(due) / max(at_once.e2e)
    assert found is not None and 0.85 * throughput_per_s < found.rate_per_s < 1.03 * throughput_per_s
    nothing_fits = predict.Server(server.times, Limits(sequences=64, batched_tokens=2048, kv_tokens=1))
    assert predict.capacity(nothing_fits, requests) == 0
