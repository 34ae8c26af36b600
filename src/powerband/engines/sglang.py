"""Adapter of SGLang's OpenAI server, written from the sources of the version that `recorded` names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import Command, EngineSettings, Footprint, Installation, Lever, Scheduling, Space
from powerband.core.host import Host
from powerband.core.model import Format, Model
from powerband.core.scoring import Answer, EngineRequest, Exchange, TokenDistribution
from powerband.engines import knobs
from powerband.engines.base import Engine, Messages
from powerband.engines.knobs import Knob

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
KvDtype = Literal["auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16"]


class SglangConfig(EngineConfig):
    """The knobs of `sglang serve`, by the names of its `ServerArgs`; upper-case knobs are environment variables."""

    # batching
    max_running_requests: Annotated[Count | None, Knob("batching")] = None
    max_queued_requests: Annotated[Count | None, Knob("queue bound")] = None
    chunked_prefill_size: Annotated[int | None, Knob("chunked prefill")] = None  # -1: no chunks
    max_prefill_tokens: Annotated[Count | None, Knob("chunked prefill")] = None
    enable_mixed_chunk: Annotated[bool | None, Knob("chunked prefill")] = None
    num_continuous_decode_steps: Annotated[Count | None, Knob("batching")] = None
    stream_interval: Annotated[Count | None, Knob("batching")] = None
    disable_overlap_schedule: Annotated[bool | None, Knob("batching")] = None
    schedule_policy: Annotated[str | None, Knob("scheduling")] = None
    schedule_conservativeness: Annotated[Annotated[float, Field(gt=0)] | None, Knob("scheduling")] = None
    enable_priority_scheduling: Annotated[bool | None, Knob("priority")] = None
    # memory, KV cache and prefix cache
    mem_fraction_static: Annotated[Share | None, Knob("memory")] = None
    max_total_tokens: Annotated[Count | None, Knob("memory")] = None
    context_length: Annotated[Count | None, Knob("context")] = None
    page_size: Annotated[Count | None, Knob("block size")] = None
    kv_cache_dtype: Annotated[KvDtype | None, Knob("KV dtype")] = None
    disable_radix_cache: Annotated[bool | None, Knob("prefix caching")] = None
    radix_eviction_policy: Annotated[str | None, Knob("prefix caching")] = None
    enable_hierarchical_cache: Annotated[bool | None, Knob("prefix caching")] = None
    hicache_ratio: Annotated[Annotated[float, Field(gt=0)] | None, Knob("prefix caching")] = None
    cpu_offload_gb: Annotated[Annotated[int, Field(ge=0)] | None, Knob("memory")] = None
    # parallelism
    tp_size: Annotated[Count | None, Knob("parallelism")] = None
    pp_size: Annotated[Count | None, Knob("parallelism")] = None
    dp_size: Annotated[Count | None, Knob("parallelism")] = None
    attn_dp_size: Annotated[Count | None, Knob("parallelism")] = None
    ep_size: Annotated[Count | None, Knob("parallelism")] = None
    # kernels
    attention_backend: Annotated[str | None, Knob("kernels")] = None
    sampling_backend: Annotated[str | None, Knob("kernels")] = None
    cuda_graph_backend_decode: Annotated[Literal["full", "breakable", "disabled"] | None, Knob("compilation")] = None
    cuda_graph_max_bs_decode: Annotated[Count | None, Knob("compilation")] = None
    enable_torch_compile: Annotated[bool | None, Knob("compilation")] = None
    # speculation
    speculative_algorithm: Annotated[str | None, Knob("speculation")] = None
    speculative_draft_model_path: Annotated[str | None, Knob("speculation")] = None
    speculative_num_steps: Annotated[Count | None, Knob("speculation")] = None
    speculative_eagle_topk: Annotated[Count | None, Knob("speculation")] = None
    speculative_num_draft_tokens: Annotated[Count | None, Knob("speculation")] = None
    speculative_ngram_max_bfs_breadth: Annotated[Count | None, Knob("speculation")] = None
    # LoRA
    enable_lora: Annotated[bool | None, Knob("LoRA")] = None
    lora_paths: Annotated[tuple[str, ...], Knob("LoRA")] = ()
    max_loras_per_batch: Annotated[Count | None, Knob("LoRA")] = None
    max_lora_rank: Annotated[Count | None, Knob("LoRA")] = None
    lora_target_modules: Annotated[tuple[str, ...], Knob("LoRA")] = ()
    # weights
    dtype: Annotated[str | None, Knob("weights")] = None
    quantization: Annotated[str | None, Knob("weights")] = None
    load_format: Annotated[str | None, Knob("weights")] = None
    trust_remote_code: Annotated[bool | None, Knob("weights")] = None
    # serving
    served_model_name: Annotated[str | None, Knob("serving")] = None
    chat_template: Annotated[str | None, Knob("serving")] = None
    device: Annotated[Literal["cuda", "cpu"] | None, Knob("serving")] = None
    random_seed: Annotated[int | None, Knob("serving")] = None
    SGLANG_CPU_OMP_THREADS_BIND: Annotated[str | None, Knob("thread binding", env=True)] = None


class Sglang(Engine[SglangConfig]):
    """SGLang: safetensors weights on GPUs."""

    name: ClassVar[str] = "sglang"
    formats: ClassVar[frozenset[Format]] = frozenset({"safetensors"})
    programs: ClassVar[tuple[str, ...]] = ("sglang",)
    recorded: ClassVar[str | None] = "0.5.23"
    typical_start_s: ClassVar[float] = 90.0
    help_args: ClassVar[tuple[str, ...]] = ("--help",)
    help_is_quick: ClassVar[bool] = False  # it imports torch
    counts_at_end: ClassVar[bool] = True
    scheduling: ClassVar[Scheduling | None] = Scheduling(
        memory_share=0.97,  # the rest is the driver's; what SGLang leaves free besides is in the footprint
        kv_formats={"auto": 2.0, "fp8_e4m3": 1.0},
        sequences=256,
        cpu_sequences=32,
        batched_tokens=8192,
        cpu_batched_tokens=4096,
        tensor_parallel=True,
    )
    config_type = SglangConfig

    def derived(self, deployment: Deployment[SglangConfig], *, model: Model) -> dict[str, Any]:
        """Return the number of GPUs that one replica occupies."""
        ways = _ways(deployment.config)
        return {"gpus_needed": math.prod(ways), "parallelism": " x ".join(map(str, ways))}

    def pinned(self, config: SglangConfig, *, threads: Sequence[int], cores: int) -> dict[str, Any]:
        """Bind the compute threads of the CPU build."""
        bound = ",".join(map(str, threads))
        return {} if config.SGLANG_CPU_OMP_THREADS_BIND else {"SGLANG_CPU_OMP_THREADS_BIND": bound}

    def knobs_for(self, settings: EngineSettings) -> dict[str, Any]:
        """Return only what differs from SGLang's defaults."""
        wanted: dict[str, Any] = {
            "context_length": settings.context,
            "max_running_requests": settings.sequences,
            "chunked_prefill_size": settings.batched_tokens,
        }
        wanted |= {"tp_size": settings.tensor * settings.data} if settings.tensor * settings.data > 1 else {}
        wanted |= {"pp_size": settings.pipeline} if settings.pipeline > 1 else {}
        wanted |= {"attn_dp_size": settings.data} if settings.data > 1 else {}  # its groups share the experts
        wanted |= {"ep_size": settings.tensor * settings.data} if settings.expert else {}
        wanted |= {"kv_cache_dtype": settings.kv_format} if settings.kv_format != "auto" else {}
        if settings.adapters:
            wanted |= {"enable_lora": True, "max_loras_per_batch": settings.adapters + 1}  # one slot: no adapter
            wanted |= {"max_lora_rank": settings.adapter_rank, "lora_target_modules": ("all",)}
        if settings.drafted:
            wanted |= _ngram(settings.drafted)
        return wanted

    def default_batch(self, host: Host) -> tuple[int, int]:
        """Return SGLang's chunk size, which depends on the memory of the GPUs, and a batch that its graphs cover."""
        return (_graph_batch(SglangConfig(), host), _chunk(host)) if host.gpus else (0, 0)

    def settings_of(self, deployment: Deployment[SglangConfig], *, model: Model, host: Host) -> EngineSettings:
        """Fill unset knobs with SGLang's defaults."""
        config = deployment.config
        data = config.attn_dp_size or 1
        running = config.max_running_requests or (48 if config.speculative_algorithm else 2048)
        return EngineSettings(
            source=deployment.variant.full_source,
            scheme=deployment.variant.scheme or "",
            kv_format=config.kv_cache_dtype or "auto",
            tensor=max(1, (config.tp_size or 1) // data),
            pipeline=config.pp_size or 1,
            data=data,
            expert=(config.ep_size or 1) > 1,
            adapters=(config.max_loras_per_batch or 8) - 1 if config.enable_lora or config.lora_paths else 0,
            adapter_rank=config.max_lora_rank or 0,
            drafted=(config.speculative_num_draft_tokens or 12) if config.speculative_algorithm == "NGRAM" else 0,
            on_cpu=not host.gpus,
            sequences=running // data,
            batched_tokens=_chunk_of(config, host),
            context=config.context_length or model.context_tokens or 4096,
            kv_bytes=self.footprint(deployment, model=model, host=host).kv_bytes or 0,
        )

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return levers for batch size, chunk size, KV cache dtype, n-gram speculation, CUDA graphs and GPUs."""
        chunk = _chunk(host)
        levers = [
            Lever(
                name="batch",
                settings={"default": {}} | {str(n): {"max_running_requests": n} for n in (32, 64, 128, 256)},
            ),
            Lever(
                name="chunk",
                settings={"default": {}} | {str(n): {"chunked_prefill_size": n} for n in (chunk // 2, 2 * chunk)},
            ),
            Lever(
                name="kv_cache",
                settings={"auto": {}} | {"fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"}},
                affects_quality=True,
            ),
            Lever(
                name="speculation",
                settings={"off": {}} | {f"ngram-{n}": _ngram(n) for n in (4, 8)},
                affects_quality=True,
                drafts=True,
            ),
        ]
        if not host.gpus:
            return Space(always={"context_length": context, "device": "cpu"}, levers=tuple(levers))
        heads = model.shape.heads if model.shape else 1
        sizes = [n for n in (2, 4, 8) if n <= len(host.gpus) and heads % n == 0]
        if sizes:
            settings: dict[str, dict[str, Any]] = {str(n): {"tp_size": n} for n in sizes}
            if model.experts:
                settings |= {f"{n}+experts": {"tp_size": n, "ep_size": n} for n in sizes}
            levers.append(Lever(name="tensor_parallel", settings={"1": {}} | settings))
        levers.append(Lever(name="cuda_graphs", settings={"on": {}, "off": _NO_GRAPHS}))
        return Space(always={"context_length": context}, fast_start=_NO_GRAPHS, levers=tuple(levers))

    def program(self, path: str) -> tuple[str, ...]:
        """Run the server module with a Python interpreter, or `sglang serve`."""
        if path.rpartition("/")[2].startswith("python"):
            return (path, "-m", "sglang.launch_server")
        return (path, "serve")

    def version_commands(self, path: str) -> tuple[tuple[str, ...], ...]:
        """Read the package metadata first: `sglang version` imports torch, which takes seconds."""
        folder, _, name = path.rpartition("/")
        python = path if name.startswith("python") else f"{folder}/python"
        quick = (python, "-c", "from importlib.metadata import version; print(version('sglang'))")
        return (quick,) if python == path else (quick, (path, "version"))

    def tokenize(self, model: str, text: str) -> Exchange[list[int]]:
        """Use /tokenize."""
        answer = yield EngineRequest("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    def render(self, model: str, chat: Messages) -> Exchange[list[int]]:
        """Use /tokenize, which accepts chat messages as well."""
        body = {"model": model, "messages": list(chat), "add_generation_prompt": True}
        answer = yield EngineRequest("/tokenize", body)
        return list(answer["tokens"])

    def score(
        self, model: str, tokens: Sequence[int], positions: Sequence[int], *, top: int
    ) -> Exchange[list[TokenDistribution]]:
        """Score all positions with one request of /generate, which returns logprobs of the prompt from a position."""
        start = max(0, min(positions) - 1)  # the first row has no logprob: it is only conditioned on
        answer = yield _request(tokens, max_tokens=1, top=top, start=start)
        own, best = answer["meta_info"]["input_token_logprobs"], answer["meta_info"]["input_top_logprobs"]
        return [TokenDistribution(own[at - start][0], _most_likely(best[at - start], top)) for at in positions]

    def answer(self, model: str, tokens: Sequence[int], *, max_tokens: int, top: int) -> Exchange[Answer]:
        """Complete with one request of /generate, whose logprobs carry token ids."""
        answer = yield _request(tokens, max_tokens=max_tokens, top=top, start=-1)
        meta = answer["meta_info"]
        written = tuple(int(token) for _, token, *_ in meta["output_token_logprobs"])
        distributions = tuple(
            TokenDistribution(own[0], _most_likely(best, top))
            for own, best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        )
        return Answer(written, distributions, answer["text"])

    def files(self, deployment: Deployment[SglangConfig]) -> dict[str, str]:
        """Return the local files that the config refers to, by knob."""
        config = deployment.config
        named = {f"lora_paths[{i}]": one.partition("=")[2] or one for i, one in enumerate(config.lora_paths)}
        draft = config.speculative_draft_model_path
        if draft and draft.startswith(("/", ".", "~")):
            named["speculative_draft_model_path"] = draft
        return {knob: path for knob, path in named.items() if path.startswith(("/", ".", "~"))}

    def footprint(self, deployment: Deployment[SglangConfig], *, model: Model, host: Host) -> Footprint:
        """Estimate weights, KV cache, and what SGLang leaves free for activations and CUDA graphs."""
        config = deployment.config
        elements = model.kv_elements_per_token()
        per_token = elements * _kv_bytes_per_element(config.kv_cache_dtype, model) if elements else None
        weights, reserved = model.weight_bytes or 0, _reserved_bytes(config, host)
        tp, pp, copies = _ways(config)
        if not host.gpus:
            kv = int((config.max_total_tokens or 0) * (per_token or 0))
            return Footprint(
                weights_bytes=weights or None, kv_bytes=kv or None, kv_bytes_per_token=per_token,
                activations_bytes=reserved, one_node=True, lower=("max_total_tokens", "context_length"),
            )  # fmt: skip
        memory = min(gpu.memory_bytes for gpu in host.gpus)
        share = config.mem_fraction_static or max(0.0, round((memory - reserved) / memory, 3))
        kv = max(int(tp * pp * share * memory) - weights, 0)
        if config.max_total_tokens and per_token:
            kv = min(kv, int(config.max_total_tokens * per_token))
        return Footprint(
            weights_bytes=weights or None,
            kv_bytes=kv,
            kv_bytes_per_token=per_token,
            activations_bytes=reserved,
            gpu_ways=tp * pp,
            copies=copies,
            gpu_free_bytes=weights // (tp * pp) + reserved,
            lower=("mem_fraction_static", "chunked_prefill_size", "context_length"),
        )

    def command(self, deployment: Deployment[SglangConfig], *, installation: Installation, port: int) -> Command:
        """Write all knobs as long options; without `--enable-metrics` SGLang has no /metrics."""
        config, placement, source = deployment.config, deployment.placement, deployment.variant.source
        argv = [*installation.program, "--model-path", source, "--host", placement.host, "--port", str(port)]
        argv += ["--enable-metrics"]
        if deployment.variant.revision:
            argv += ["--revision", deployment.variant.revision]
        if config.served_model_name is None:
            argv += ["--served-model-name", deployment.served_name]
        env = {"PYTHONUNBUFFERED": "1"}
        if config.device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        if source.startswith(("/", ".", "~")):
            env["HF_HUB_OFFLINE"] = "1"
        return Command(argv=(*argv, *knobs.arguments(config)), env=env | knobs.environment(config))


_NO_GRAPHS = {"cuda_graph_backend_decode": "disabled"}


def _ways(config: SglangConfig) -> tuple[int, int, int]:
    """Return the GPUs of tensor parallelism (attention data parallelism divides them), pipeline, and replicas."""
    return config.tp_size or 1, config.pp_size or 1, config.dp_size or 1


def _gpu_mib(host: Host) -> int:
    return min((gpu.memory_bytes for gpu in host.gpus), default=0) // 2**20


def _chunk(host: Host) -> int:
    """Return SGLang's default chunk of a prefill, which depends on the memory of the GPU."""
    mib = _gpu_mib(host)
    if not mib:
        return 4096
    return 2048 if mib < 20 * 1024 else 4096 if mib < 60 * 1024 else 8192 if mib < 160 * 1024 else 16384


def _chunk_of(config: SglangConfig, host: Host) -> int:
    """Return the tokens of a prefill step; without chunks, the limit of a prefill batch."""
    chunk = config.chunked_prefill_size
    return (chunk if chunk and chunk > 0 else config.max_prefill_tokens or 16384) if chunk else _chunk(host)


def _graph_batch(config: SglangConfig, host: Host) -> int:
    """Return the largest batch that SGLang captures as a CUDA graph; larger ones run without graphs."""
    mib, few = _gpu_mib(host), (config.tp_size or 1) < 4
    if config.cuda_graph_max_bs_decode:
        return config.cuda_graph_max_bs_decode
    if mib < 20 * 1024:
        return 8
    if mib < 60 * 1024:
        return (48 if mib < 35 * 1024 else 32) if few else 160
    return 256 if mib < 160 * 1024 and few else 512


def _reserved_bytes(config: SglangConfig, host: Host) -> int:
    """Return what SGLang leaves free on each GPU for activations and CUDA graphs, by its own heuristic."""
    mib = 512 + 1.5 * max(_chunk_of(config, host), 2048) + _ways(config)[0] * _ways(config)[1] * 128.0
    if config.cuda_graph_backend_decode != "disabled" and host.gpus:
        mib += 2 * _graph_batch(config, host)
    if _gpu_mib(host) > 60 * 1024:
        mib = max(mib, 10 * 1024)
    return int(mib * 2**20)


def _kv_bytes_per_element(kv_dtype: str | None, model: Model) -> float:
    """Return the bytes of one KV cache element; 4-bit formats have a scale of one byte for 16 elements."""
    if kv_dtype in (None, "auto"):
        return 4.0 if model.dtype == "float32" else 2.0
    assert kv_dtype is not None
    return 2.0 if kv_dtype.startswith("bf") else 0.5 + 1 / 16 if "fp4" in kv_dtype else 1.0


def _ngram(drafts: int) -> dict[str, Any]:
    """Return knobs of n-gram speculation: one line of drafts, and as many running requests as without it."""
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": drafts,
        "speculative_ngram_max_bfs_breadth": 1,
    }


def _request(tokens: Sequence[int], *, max_tokens: int, top: int, start: int) -> EngineRequest:
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
        "return_logprob": True,
        "top_logprobs_num": top,
        "logprob_start_len": start,
    }
    return EngineRequest("/generate", body)


def _most_likely(best: Sequence[Sequence[Any]] | None, top: int) -> tuple[tuple[int, float], ...]:
    """Return token ids with their logprobs, most likely first, from rows (logprob, token id, text)."""
    rows = sorted(((int(token), float(logprob)) for logprob, token, *_ in best or ()), key=lambda one: -one[1])
    return tuple(rows[:top])


ENGINE = Sglang()
