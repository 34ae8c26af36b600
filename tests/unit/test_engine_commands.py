"""The exact command lines of each adapter, its rules, and its memory estimates."""

from typing import Any

import pytest

from powerband import engines
from powerband.cli.engine import step_line
from powerband.core.engine import Installation, StepProgress
from powerband.core.host import Gpu
from powerband.testing.engine_contract import HOST, MODEL


def argv(engine: str, program: tuple[str, ...] = ("/e",), **config: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = command(engine, program, **config).argv
    return found


def command(
    engine: str, program: tuple[str, ...] = ("/e",), source: str = "/m.gguf", build: str | None = None, **config: Any
) -> Any:
    data = {"name": "m", "variant": {"source": source}, "engine": engine, "config": config}
    deployment = engines.deployment_type(engine).model_validate(data)
    installation = Installation(engine=engine, version="1", origin="given", program=program, build=build)
    return engines.get(engine).command(deployment, installation=installation, port=9)


LLAMA = ("/e", "--model", "/m.gguf", "--host", "127.0.0.1", "--port", "9", "--metrics", "--no-ui", "--alias", "m")


def test_llamacpp_writes_flags_pairs_lists_and_extras() -> None:
    found = argv(
        "llamacpp",
        parallel=4,
        cont_batching=False,
        cache_prompt=True,
        spec_type=["ngram-simple", "ngram-mod"],
        lora=["a.gguf", "b.gguf"],
        n_gpu_layers="all",
        swa_full=False,
        extra_args=["--verbose"],
    )
    assert found == (
        *LLAMA,
        *("--parallel", "4", "--no-cont-batching", "--cache-prompt", "--spec-type", "ngram-simple,ngram-mod"),
        *("--lora", "a.gguf,b.gguf", "--n-gpu-layers", "all", "--verbose"),
    )


def test_a_llamacpp_that_downloads_itself_gets_the_repository_and_the_file() -> None:
    found = command("llamacpp", source="org/model-GGUF:model-q4_k_m.gguf").argv
    assert found[1:5] == ("--hf-repo", "org/model-GGUF", "--hf-file", "model-q4_k_m.gguf")


def test_vllm_writes_json_environment_and_adapters() -> None:
    found = command(
        "vllm",
        source="/model",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        kv_cache_memory_bytes="1GiB",
        lora_modules=[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}],
        enable_lora=True,
        VLLM_CPU_OMP_THREADS_BIND="0-1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING=True,
        extra_env={"LD_PRELOAD": "/lib/tcmalloc.so"},
    )
    assert found.argv == (
        *("/e", "--model", "/model", "--host", "127.0.0.1", "--port", "9", "--served-model-name", "m"),
        *("--lora-modules", "a=/a", "b=/b", "--kv-cache-memory-bytes", "1073741824"),
        *("--speculative-config", '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}'),
        "--enable-lora",
    )
    assert found.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert found.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert found.env["LD_PRELOAD"] == "/lib/tcmalloc.so"
    assert found.env["VLLM_HOST_IP"] == "127.0.0.1"  # vLLM's internal sockets stay on loopback


@pytest.mark.parametrize(("build", "value"), [("cpu-torch-2.8", "0"), ("cuda", None), (None, None)])
def test_ahead_of_time_compilation_is_disabled_for_cpu_builds(build: str | None, value: str | None) -> None:
    assert command("vllm", build=build).env.get("VLLM_USE_AOT_COMPILE") == value


def test_vllm_serve_takes_the_model_as_an_argument() -> None:
    assert argv("vllm", ("/bin/vllm", "serve"))[:3] == ("/bin/vllm", "serve", "/m.gguf")


def problems(engine: str, host: Any = HOST, flags: frozenset[str] | None = None, **config: Any) -> dict[str, str]:
    data = {"variant": {"source": "/m"}, "engine": engine, "config": config}
    deployment = engines.deployment_type(engine).model_validate(data)
    installation = Installation(engine=engine, version="0.32.0", origin="given", program=("/e",), flags=flags)
    found = engines.get(engine).check(deployment, model=MODEL, host=host, installation=installation)
    return {problem.rule: problem.severity for problem in found}


@pytest.mark.parametrize(
    ("engine", "config", "rule"),
    [
        ("vllm", {"tensor_parallel_size": 2}, "tp-divides-heads"),
        ("vllm", {"max_model_len": 9000}, "context-too-long"),
        ("vllm", {"pipeline_parallel_size": 2}, "cpu-pipeline-parallel"),
        ("vllm", {"quantization": "fp8"}, "cpu-fp8-weights"),
        ("vllm", {"quantization": "awq"}, "quantization-of-unquantized-weights"),
        ("vllm", {"block_size": 17}, "cpu-block-size"),
        ("vllm", {"max_num_batched_tokens": 8, "max_num_seqs": 64}, "batch-below-seqs"),
        ("vllm", {"lora_modules": [{"name": "a", "path": "/a"}]}, "lora-not-enabled"),
        ("vllm", {"enable_expert_parallel": True}, "experts-without-moe"),
        ("vllm", {}, "cpu-compile-needs-compiler"),
        ("llamacpp", {"spec_draft_model": "/d.gguf"}, "draft-without-type"),
        ("llamacpp", {"spec_type": ["draft-simple"]}, "type-without-draft"),
        ("llamacpp", {"flash_attn": "off", "cache_type_v": "q8_0"}, "quantized-v-needs-flash-attention"),
        ("llamacpp", {"cache_prompt": False, "cache_reuse": 64}, "reuse-without-cache"),
        ("llamacpp", {"ctx_size": 40000, "parallel": 4}, "context-too-long"),
        ("llamacpp", {"ctx_size": 512, "parallel": 32}, "context-too-small"),
        ("llamacpp", {"cpu_moe": True}, "experts-without-moe"),
    ],
)
def test_a_known_conflict_is_refused(engine: str, config: dict[str, Any], rule: str) -> None:
    assert problems(engine, **config).get(rule) == "refuse"


def test_a_valid_deployment_is_not_refused() -> None:
    host = HOST.model_copy(update={"compiler": "/usr/bin/c++"})
    assert "refuse" not in problems("vllm", host, max_model_len=8192, block_size=64, tensor_parallel_size=3).values()
    assert problems("llamacpp", ctx_size=32768, parallel=4, cache_type_k="q8_0") == {}


def test_cpu_rules_do_not_apply_with_a_gpu() -> None:
    gpu = Gpu(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, free_bytes=79 * 2**30, driver="550")
    host = HOST.model_copy(update={"gpus": (gpu,)})
    assert problems("vllm", host, block_size=16) == {}


def test_all_kinds_of_parallelism_count_for_the_gpus() -> None:
    gpu = Gpu(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, free_bytes=79 * 2**30, driver="550")
    host = HOST.model_copy(update={"gpus": (gpu,) * 4})
    assert "parallelism-exceeds-gpus" not in problems("vllm", host, tensor_parallel_size=3)
    assert "parallelism-exceeds-gpus" in problems("vllm", host, pipeline_parallel_size=5)
    assert "parallelism-exceeds-gpus" in problems("vllm", host, data_parallel_size=2, tensor_parallel_size=3)
    assert "gpu-block-size" in problems("vllm", host, block_size=17)


def test_an_unknown_flag_is_refused() -> None:
    known = frozenset({"--parallel"})
    assert problems("llamacpp", flags=known, parallel=2) == {}
    assert problems("llamacpp", flags=known, batch_size=8) == {"unknown-flag": "refuse"}
    assert problems("llamacpp", flags=known, extra_args=["--paralel", "2"]) == {"unknown-flag": "refuse"}


def test_an_old_engine_is_refused() -> None:
    data = {"variant": {"source": "/m"}, "engine": "vllm"}
    deployment = engines.deployment_type("vllm").model_validate(data)
    old = Installation(engine="vllm", version="0.9.1", origin="path", program=("/e",))
    found = engines.get("vllm").check(deployment, model=MODEL, host=HOST, installation=old)
    assert "engine-too-old" in [problem.rule for problem in found]


def test_an_8_bit_kv_cache_halves_the_bytes_per_token() -> None:
    def per_token(engine: str, **config: Any) -> float:
        data = {"variant": {"source": "/m"}, "engine": engine, "config": config}
        deployment = engines.deployment_type(engine).model_validate(data)
        footprint = engines.get(engine).footprint(deployment, model=MODEL, host=HOST)
        assert footprint.kv_bytes_per_token is not None
        return footprint.kv_bytes_per_token

    assert per_token("llamacpp") == 2 * 30 * 3 * 64 * 2 == 23040  # llama-server reports 180 MiB for 8192 tokens
    assert per_token("llamacpp", cache_type_k="q8_0", cache_type_v="q8_0") == 23040 * 17 / 32
    assert per_token("vllm") == 23040
    assert 1.8 < per_token("vllm") / per_token("vllm", kv_cache_dtype="int8_per_token_head") <= 2.0


@pytest.mark.parametrize(("instructions", "offered"), [({"avx2"}, True), ({"avx512f", "avx512_bf16"}, False)])
def test_float32_is_a_lever_on_cpus_without_16_bit_instructions(instructions: set[str], offered: bool) -> None:
    host = HOST.model_copy(update={"instruction_sets": frozenset(instructions)})
    published = MODEL.model_copy(update={"dtype": "bfloat16"})
    space = engines.get("vllm").space(model=published, host=host, context=2048)
    assert ("dtype" in [one.name for one in space.levers]) is offered


def test_float32_doubles_the_memory_of_unquantized_weights() -> None:
    published = MODEL.model_copy(update={"dtype": "bfloat16"})
    data = {"variant": {"source": "/m"}, "engine": "vllm", "config": {"dtype": "float32"}}
    deployment = engines.deployment_type("vllm").model_validate(data)
    found = engines.get("vllm").footprint(deployment, model=published, host=HOST)
    assert (found.weights_bytes, found.kv_bytes_per_token) == (2 * 269_000_000, 2 * 23040)
    narrow = published.model_copy(update={"quantization": "compressed-tensors"})
    assert engines.get("vllm").footprint(deployment, model=narrow, host=HOST).weights_bytes == 269_000_000


@pytest.mark.parametrize(
    ("elapsed_s", "fraction", "line"),
    [
        (0.0, None, "6/11  compile llama.cpp"),
        (12.0, None, "6/11  compile llama.cpp  12 s gone"),
        (20.0, 0.4, "6/11  compile llama.cpp  40%  20 s gone, about 30 s left"),
        (246.0, 0.37, "6/11  compile llama.cpp  37%  4 min gone, about 7 min left"),
    ],
)
def test_the_progress_of_a_step_has_an_estimate(elapsed_s: float, fraction: float | None, line: str) -> None:
    step = StepProgress(title="compile llama.cpp", number=6, total=11, elapsed_s=elapsed_s, fraction=fraction)
    assert step_line(step) == line
