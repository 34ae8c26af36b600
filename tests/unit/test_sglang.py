"""SGLang: command lines, the shapes of its HTTP API, its metrics and memory; it is never a default."""

from __future__ import annotations

from typing import Any

import pytest

import powerband.plan as plan
from powerband import engines, inputs
from powerband.core.deployment import Deployment
from powerband.core.engine import EngineSettings, Gauges, Installation
from powerband.core.host import Gpu, Host
from powerband.core.plan import Rejection
from powerband.plan.options import Lengths, Offer, Option, options
from powerband.runtime import installations, model_files
from powerband.testing.engine_contract import HOST, MODEL
from powerband.tune import spec as tune_spec

ENGINE = engines.get("sglang")
H100 = Gpu(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2**20, free_bytes=81559 * 2**20, driver="")
L4 = H100.model_copy(update={"name": "NVIDIA L4", "memory_bytes": 23034 * 2**20})


def host(*gpus: Gpu) -> Host:
    return HOST.model_copy(update={"gpus": gpus})


def deployment(source: str = "/model", **config: Any) -> Deployment[Any]:
    data = {"name": "m", "variant": {"source": source}, "engine": "sglang", "config": config}
    return engines.deployment_of(data)


def argv(program: tuple[str, ...] = ("/e", "serve"), **config: Any) -> tuple[str, ...]:
    installation = Installation(engine="sglang", version="0.5.23", origin="given", program=program)
    return ENGINE.command(deployment(**config), installation=installation, port=9).argv


def test_it_writes_flags_lists_and_extras() -> None:
    found = argv(tp_size=2, disable_radix_cache=True, lora_paths=["a=/a", "b=/b"], extra_args=["--log-level", "debug"])
    assert found == (
        *("/e", "serve", "--model-path", "/model", "--host", "127.0.0.1", "--port", "9", "--enable-metrics"),
        *("--served-model-name", "m", "--disable-radix-cache", "--tp-size", "2", "--lora-paths", "a=/a", "b=/b"),
        *("--log-level", "debug"),
    )


@pytest.mark.parametrize(
    ("path", "program"),
    [
        ("/opt/sglang/bin/sglang", ("/opt/sglang/bin/sglang", "serve")),
        ("/opt/sglang/bin/python3", ("/opt/sglang/bin/python3", "-m", "sglang.launch_server")),
    ],
)
def test_a_program_or_an_interpreter_starts_the_server(path: str, program: tuple[str, ...]) -> None:
    assert ENGINE.program(path) == program
    assert ENGINE.version_commands(path)[0][0].endswith(("python", "python3"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor": 4, "pipeline": 2},
        {"data": 4, "expert": True},
        {"kv_format": "fp8_e4m3"},
        {"drafted": 4},
        {"adapters": 3, "adapter_rank": 16},
    ],
)
def test_settings_survive_their_knobs(changes: dict[str, Any]) -> None:
    data = {"source": "/model", "scheme": "", "kv_format": "auto", "sequences": 64, "batched_tokens": 4096}
    settings = EngineSettings.model_validate({**data, "context": 2048, "kv_bytes": 0, **changes})
    made = deployment(**ENGINE.knobs_for(settings))
    found = ENGINE.settings_of(made, model=MODEL, host=host(*[H100] * 8))
    sequences = settings.sequences // settings.data
    assert found.model_copy(update={"kv_bytes": 0}) == settings.model_copy(update={"sequences": sequences})


@pytest.mark.parametrize(
    ("gpu", "config", "reserved_mib"),
    [  # 512 MiB, 1.5 MiB for each token of a chunk, 128 MiB for each GPU, 2 MiB for each sequence of the largest graph
        (L4, {}, 512 + 1.5 * 4096 + 128 + 2 * 48),
        (L4, {"chunked_prefill_size": 2048, "cuda_graph_backend_decode": "disabled"}, 512 + 1.5 * 2048 + 128),
        (H100, {}, 512 + 1.5 * 8192 + 128 + 2 * 256),
        (H100, {"chunked_prefill_size": 2048}, 10 * 1024),
    ],
)
def test_it_leaves_free_what_sglang_leaves_free(gpu: Gpu, config: dict[str, Any], reserved_mib: float) -> None:
    found = ENGINE.footprint(deployment(**config), model=MODEL, host=host(gpu))
    assert found.activations_bytes == reserved_mib * 2**20
    assert found.kv_bytes is not None and found.weights_bytes is not None
    assert found.kv_bytes + found.weights_bytes + found.activations_bytes == pytest.approx(gpu.memory_bytes, rel=0.001)


def test_a_score_reads_the_rows_from_the_token_before_the_first_position() -> None:
    exchange = ENGINE.score("m", [5, 6, 7, 8], [2, 3], top=2)
    asked = next(exchange)
    assert asked.path == "/generate" and asked.body["input_ids"] == [5, 6, 7, 8]
    assert asked.body["logprob_start_len"] == 1 and asked.body["top_logprobs_num"] == 2
    rows = [[None, 6, None], [-0.5, 7, None], [-2.0, 8, None]]
    best = [None, [[-0.5, 7, None], [-1.0, 9, None]], [[-1.5, 3, None], [-0.1, 4, None]]]
    with pytest.raises(StopIteration) as end:
        exchange.send({"text": "x", "meta_info": {"input_token_logprobs": rows, "input_top_logprobs": best}})
    first, second = end.value.value
    assert first == (-0.5, ((7, -0.5), (9, -1.0)))
    assert second == (-2.0, ((4, -0.1), (3, -1.5)))


def test_an_answer_has_the_ids_and_distributions_of_its_tokens() -> None:
    exchange = ENGINE.answer("m", [5], max_tokens=2, top=1)
    assert next(exchange).body["sampling_params"] == {"temperature": 0, "max_new_tokens": 2}
    meta = {
        "output_token_logprobs": [[-0.1, 11, "a"], [-0.2, 12, "b"]],
        "output_top_logprobs": [[[-0.1, 11, "a"]], [[-0.2, 12, "b"]]],
    }
    with pytest.raises(StopIteration) as end:
        exchange.send({"text": "ab", "meta_info": meta})
    assert end.value.value == ((11, 12), ((-0.1, ((11, -0.1),)), (-0.2, ((12, -0.2),))), "ab")


PAGE = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 7.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 100.0
sglang:prompt_tokens_total{model_name="m",is_streaming="false"} 20.0
# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{model_name="m",cache_source="device"} 40.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 4.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.5
sglang:time_to_first_token_seconds_count{model_name="m"} 4.0
"""


def test_metrics_are_read_by_powerbands_names() -> None:
    assert ENGINE.gauges({"/metrics": PAGE}) == Gauges(
        queue_depth=3, running=7, kv_use=0.28, prompt_tokens=120, prefix_queries_tokens=120, prefix_hits_tokens=40,
        ttft_total_s=2.5, ttft_count=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"tp_size": 2}, "tp-divides-heads"),
        ({"dp_size": 3}, "parallelism-exceeds-gpus"),
        ({"context_length": 100_000}, "context-too-long"),
        ({"attn_dp_size": 2}, "attention-dp-without-tp"),
        ({"chunked_prefill_size": 100, "page_size": 64}, "chunk-not-a-multiple-of-page"),
        ({"speculative_algorithm": "NGRAM", "pp_size": 2}, "speculation-with-pipeline"),
        ({"enable_lora": True}, "lora-needs-adapters-or-shape"),
        ({"ep_size": 2}, "experts-without-moe"),
        ({"served_model_name": "a:b"}, "name-with-colon"),
    ],
)
def test_what_sglang_refuses_is_refused_before_the_start(config: dict[str, Any], rule: str) -> None:
    problems = ENGINE.check(deployment(**config), model=MODEL, host=host(H100, H100), installation=installed())
    assert {one.rule for one in problems if one.severity == "refuse"} == {rule}


def installed() -> Installation:
    return Installation(engine="sglang", version="0.5.23", origin="given", program=("/e", "serve"))


def test_every_start_says_that_nobody_has_run_it() -> None:
    problems = ENGINE.check(deployment(), model=MODEL, host=host(H100), installation=installed())
    assert [(one.rule, one.severity) for one in problems] == [("never-run", "warn")]
    assert "0.5.23" in problems[0].sentence


def planned(wanted: str | None) -> list[Option | Rejection]:
    model = model_files.architecture("Qwen/Qwen3-8B")
    offer = Offer(plan.device("h100-sxm"), 1, 2.0)
    schemes = plan.eligible_schemes(model, wanted=["bf16"])
    return list(options(model, offer, Lengths(200, 100, 2048), schemes, wanted_engine=wanted))


def test_a_plan_offers_it_only_by_name() -> None:
    assert {one.engine for one in planned(None)} == {"vllm"}
    named = [one for one in planned("sglang") if isinstance(one, Option)]
    assert named and all(one.engine == "sglang" and one.documented for one in named)


@pytest.mark.parametrize(("asked", "tried"), [((), ["vllm", "llamacpp"]), (("sglang",), ["sglang"])])
def test_a_study_tries_it_only_by_name(
    asked: tuple[str, ...], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installations, "find", lambda name: installed())
    spec = tune_spec.TuneSpec("/model", inputs.workload("chat"), inputs.slo("interactive"), engines=asked)
    assert tune_spec._engines(spec, MODEL.model_copy(update={"format": "safetensors"})) == tried
