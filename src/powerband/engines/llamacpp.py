"""Adapter of llama.cpp's `llama-server`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from powerband.core import hub_id, plain_data
from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import (
    Archive,
    Command,
    EngineSettings,
    Footprint,
    Gauges,
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
from powerband.engines import knobs, rules
from powerband.engines.base import Engine, Messages
from powerband.engines.knobs import Knob

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
Count = Annotated[int, Field(ge=1)]

# Bytes per element: llama.cpp packs 32 elements into a block with its scale.
_CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


class LlamaCppConfig(EngineConfig):
    """The knobs of `llama-server`, by its long option names."""

    # batching
    parallel: Annotated[Count | None, Knob("slots")] = None
    cont_batching: Annotated[bool | None, Knob("batching", off="--no-cont-batching")] = None
    batch_size: Annotated[Count | None, Knob("batching")] = None
    ubatch_size: Annotated[Count | None, Knob("chunked prefill")] = None
    # context and KV cache
    ctx_size: Annotated[Annotated[int, Field(ge=0)] | None, Knob("context")] = None
    kv_unified: Annotated[bool | None, Knob("KV sharing", off="--no-kv-unified")] = None
    cache_type_k: Annotated[CacheType | None, Knob("KV dtype")] = None
    cache_type_v: Annotated[CacheType | None, Knob("KV dtype")] = None
    flash_attn: Annotated[Literal["on", "off", "auto"] | None, Knob("attention")] = None
    swa_full: Annotated[bool | None, Knob("KV sharing")] = None
    context_shift: Annotated[bool | None, Knob("context", off="--no-context-shift")] = None
    # prefix caching
    cache_prompt: Annotated[bool | None, Knob("prefix caching", off="--no-cache-prompt")] = None
    cache_reuse: Annotated[Annotated[int, Field(ge=0)] | None, Knob("prefix caching")] = None
    cache_ram: Annotated[Annotated[int, Field(ge=-1)] | None, Knob("prefix caching")] = None
    slot_prompt_similarity: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Knob("prefix caching")] = None
    # speculation
    spec_type: Annotated[tuple[str, ...], Knob("speculation", join=",")] = ()
    spec_draft_model: Annotated[str | None, Knob("speculation")] = None
    spec_draft_n_max: Annotated[Count | None, Knob("speculation")] = None
    spec_draft_n_min: Annotated[Annotated[int, Field(ge=0)] | None, Knob("speculation")] = None
    spec_draft_p_min: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Knob("speculation")] = None
    spec_ngram_simple_size_n: Annotated[Count | None, Knob("speculation")] = None
    spec_ngram_simple_size_m: Annotated[Count | None, Knob("speculation")] = None
    spec_ngram_simple_min_hits: Annotated[Count | None, Knob("speculation")] = None
    spec_ngram_mod_n_min: Annotated[Count | None, Knob("speculation")] = None
    spec_ngram_mod_n_max: Annotated[Count | None, Knob("speculation")] = None
    spec_ngram_mod_n_match: Annotated[Count | None, Knob("speculation")] = None
    # LoRA
    lora: Annotated[tuple[str, ...], Knob("LoRA", join=",")] = ()
    lora_scaled: Annotated[tuple[str, ...], Knob("LoRA", join=",")] = ()
    lora_init_without_apply: Annotated[bool | None, Knob("LoRA")] = None
    # CPU
    threads: Annotated[Count | None, Knob("threads")] = None
    threads_batch: Annotated[Count | None, Knob("threads")] = None
    threads_http: Annotated[Count | None, Knob("threads")] = None
    cpu_mask: Annotated[str | None, Knob("thread binding")] = None
    cpu_range: Annotated[str | None, Knob("thread binding")] = None
    cpu_strict: Annotated[Literal[0, 1] | None, Knob("thread binding")] = None
    prio: Annotated[Annotated[int, Field(ge=-1, le=3)] | None, Knob("thread binding")] = None
    poll: Annotated[Annotated[int, Field(ge=0, le=100)] | None, Knob("thread binding")] = None
    numa: Annotated[Literal["distribute", "isolate", "numactl"] | None, Knob("thread binding")] = None
    # weights and memory
    load_mode: Annotated[str | None, Knob("weights")] = None
    repack: Annotated[bool | None, Knob("weights", off="--no-repack")] = None
    sleep_idle_seconds: Annotated[Annotated[int, Field(ge=-1)] | None, Knob("memory")] = None
    # accelerators
    n_gpu_layers: Annotated[int | Literal["auto", "all"] | None, Knob("parallelism")] = None
    split_mode: Annotated[Literal["none", "layer", "row", "tensor"] | None, Knob("parallelism")] = None
    tensor_split: Annotated[tuple[float, ...], Knob("parallelism", join=",")] = ()
    main_gpu: Annotated[Annotated[int, Field(ge=0)] | None, Knob("parallelism")] = None
    device: Annotated[tuple[str, ...], Knob("parallelism", join=",")] = ()
    kv_offload: Annotated[bool | None, Knob("parallelism", off="--no-kv-offload")] = None
    cpu_moe: Annotated[bool | None, Knob("expert placement")] = None
    n_cpu_moe: Annotated[Annotated[int, Field(ge=0)] | None, Knob("expert placement")] = None
    override_tensor: Annotated[tuple[str, ...], Knob("expert placement", join=",")] = ()
    fit: Annotated[Literal["on", "off"] | None, Knob("memory")] = None
    # serving
    alias: Annotated[str | None, Knob("serving")] = None
    jinja: Annotated[bool | None, Knob("serving", off="--no-jinja")] = None
    chat_template_file: Annotated[str | None, Knob("serving")] = None
    timeout: Annotated[Count | None, Knob("serving")] = None
    seed: Annotated[int | None, Knob("serving")] = None


class LlamaCpp(Engine[LlamaCppConfig]):
    """llama.cpp: GGUF weights on CPUs, GPUs and Apple silicon."""

    name: ClassVar[str] = "llamacpp"
    formats: ClassVar[frozenset[Format]] = frozenset({"gguf"})
    programs: ClassVar[tuple[str, ...]] = ("llama-server",)
    default_version: ClassVar[str | None] = "0.3.36"
    counts_at_end: ClassVar[bool] = True
    keep_alive: ClassVar[bool] = False  # each idle connection blocks a server thread
    gauge_pages: ClassVar[tuple[str, ...]] = ("/metrics", "/slots")  # /metrics has no KV cache usage
    scheduling: ClassVar[Scheduling | None] = Scheduling(
        memory_share=0.95,
        kv_formats={"f16": 2.0, "q8_0": 1.0625},
        sequences=32,
        cpu_sequences=8,
        batched_tokens=2048,
        cpu_batched_tokens=2048,
        separate_prefill_decode=True,  # sequences of different lengths run in separate batches
        tensor_parallel=False,
    )
    config_type = LlamaCppConfig

    def knobs_for(self, settings: EngineSettings) -> dict[str, Any]:
        """Use one slot per sequence, each with the full context; on a GPU offload all layers."""
        wanted: dict[str, Any] = {
            "parallel": settings.sequences,
            "ctx_size": settings.sequences * settings.context,
            "batch_size": settings.batched_tokens,
            "cache_ram": 0,
        }
        if settings.kv_format != "f16":
            wanted |= {"cache_type_k": settings.kv_format, "cache_type_v": settings.kv_format}
        if settings.drafted:
            wanted |= {"spec_type": ("ngram-simple",), "spec_ngram_simple_size_m": settings.drafted}
        return wanted | ({} if settings.on_cpu else {"n_gpu_layers": "all"})

    def settings_of(self, deployment: Deployment[LlamaCppConfig], *, model: Model, host: Host) -> EngineSettings:
        """Fill unset knobs with llama-server's defaults: four slots, and the model's context length."""
        config, footprint = deployment.config, self.footprint(deployment, model=model, host=host)
        slots = config.parallel or 4
        return EngineSettings(
            source=deployment.variant.full_source,
            scheme=deployment.variant.scheme or "",
            kv_format=_kv_format(config),
            pipeline=max(1, footprint.gpu_ways),
            on_cpu=not footprint.gpu_ways,
            drafted=(config.spec_ngram_simple_size_m or config.spec_draft_n_max or 16) if config.spec_type else 0,
            sequences=slots,
            batched_tokens=config.batch_size or 2048,
            context=(config.ctx_size or model.context_tokens or 4096) // slots,
            kv_bytes=footprint.kv_bytes or 0,
        )

    def pinned(self, config: LlamaCppConfig, *, threads: Sequence[int], cores: int) -> dict[str, Any]:
        """Start one compute thread per core: by default llama-server counts the cores of the whole machine."""
        return {} if config.threads else {"threads": cores}

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return levers for slots, KV cache dtype, n-gram speculation, prompt chunk size, and polling."""
        slots = (2, 8, 16) if not host.gpus else (8, 16, 32, 64)
        q8_0 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
        levers = [
            Lever(
                name="slots",
                settings={"4": {}} | {str(n): {"parallel": n, "ctx_size": n * context} for n in slots},
            ),
            Lever(name="kv_cache", settings={"f16": {}, "q8_0": q8_0}, affects_quality=True),
            Lever(
                name="speculation",
                settings={"off": {}}
                | {f"ngram-{n}": {"spec_type": ("ngram-simple",), "spec_ngram_simple_size_m": n} for n in (4, 12)},
                affects_quality=True,
                drafts=True,
            ),
            Lever(
                name="chunk",
                settings={"2048": {}, "512": {"batch_size": 512}, "128": {"batch_size": 128, "ubatch_size": 128}},
            ),
        ]
        if host.gpus:
            return Space(always={"n_gpu_layers": "all"}, levers=tuple(levers))
        polling = Lever(name="polling", settings={"on": {}, "off": {"poll": 0}})
        return Space(levers=(*levers, polling))

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Build from the source in llama-cpp-python's sdist, for the instruction sets of this CPU."""
        options, cores = _build_options(host), len(host.cores)
        python, cmake = "{home}/env/bin/python", "{home}/env/bin/cmake"
        sdist = f"{{home}}/source/llama_cpp_python-{version}.tar.gz"
        source = f"{sdist.removesuffix('.tar.gz')}/vendor/llama.cpp"
        wheels = ("cmake", "ninja") if host.compiler else ("cmake", "ninja", "ziglang")
        steps = [
            Step(title="create a virtual environment", argv=("{python}", "-m", "venv", "{home}/env")),
            Step(title="download the build tools", argv=(python, "-m", "pip", "install", "--quiet", *wheels)),
            *(() if host.compiler else (Step(title="set up zig as the compiler", argv=(python, "-c", _WRAP_ZIG)),)),
            Step(
                title=f"download the source (llama-cpp-python {version})",
                argv=(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python",
                      "--dest", "{home}/source", f"llama-cpp-python=={version}"),
            ),
            Step(title="unpack the source", argv=(python, "-m", "tarfile", "-e", sdist, "{home}/source")),
            Step(title="configure", argv=(cmake, "-G", "Ninja", "-S", source, "-B", "{home}/build", *options)),
            Step(
                title="compile llama.cpp",
                argv=(cmake, "--build", "{home}/build", "--parallel", "{jobs}", "--target", *_TOOLS),
            ),
            Step(title="install the programs", argv=(cmake, "-E", "rename", "{home}/build/bin", "{home}/bin")),
            Step(
                title="install the converters",
                argv=(cmake, "-E", "copy_directory", f"{source}/gguf-py", "{home}/convert/gguf-py"),
            ),
            Step(title="install the converters",
                 argv=(cmake, "-E", "copy_directory", f"{source}/conversion", "{home}/convert/conversion")),
            Step(
                title="install the converters",
                argv=(cmake, "-E", "copy", f"{source}/convert_hf_to_gguf.py", f"{source}/convert_lora_to_gguf.py",
                      f"{source}/LICENSE", "{home}/convert"),
            ),
            Step(title="remove build files", argv=(cmake, "-E", "rm", "-rf", "{home}/build", "{home}/source")),
        ]  # fmt: skip
        enabled = sorted(o[7:-3].lower() for o in options if o.startswith("-DGGML_") and o.endswith("=ON"))
        return InstallPlan(
            engine=self.name,
            version=version,
            build="+".join(enabled),
            steps=tuple(steps),
            program=("{home}/bin/llama-server",),
            instruction_sets=_usable(host),
            tools={tool: f"{{home}}/bin/{tool}" for tool in _TOOLS} | {"converters": "{home}/convert"},
            expects=f"compiles for about {max(1, _COMPILE_CORE_MIN // cores)} minutes on {cores} cores; keeps 160 MB",
        )

    def prebuilt_plan(self, host: Host, archive: Archive | None = None) -> InstallPlan | None:
        """Unpack an archive of llama.cpp's releases; a host with GPUs gets a build of its own instead."""
        published = [] if host.gpus else rules.facts(self.name).archives
        fitting = (one for one in published if (one.machine, one.system) == (host.machine, host.system))
        if (chosen := archive or next(fitting, None)) is None:
            return None
        unpack = ("{python}", "-m", "powerband.runtime.archives", chosen.source, "--sha256", chosen.sha256,
                  "--program", "llama-server", "--output", "{home}/bin")  # fmt: skip
        size = f" of {chosen.size_bytes / 1e6:.0f} MB" if chosen.size_bytes else ""
        return InstallPlan(
            engine=self.name,
            version=chosen.version,
            build=f"prebuilt-{chosen.sha256[:12]}",
            steps=(Step(title=f"fetch {chosen.source.rpartition('/')[2]}", argv=unpack),),
            program=("{home}/bin/llama-server",),
            tools={tool: f"{{home}}/bin/{tool}" for tool in _TOOLS},
            expects=f"unpacks an archive{size}: about a minute",
        )

    def tokenize(self, model: str, text: str) -> Exchange[list[int]]:
        """Use llama-server's /tokenize."""
        answer = yield EngineRequest("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        return list(answer["tokens"])

    def render(self, model: str, chat: Messages) -> Exchange[list[int]]:
        """Render the chat with /apply-template, then tokenize the text."""
        answer = yield EngineRequest("/apply-template", {"messages": list(chat)})
        return (yield from self.tokenize(model, answer["prompt"]))

    def score(
        self, model: str, tokens: Sequence[int], positions: Sequence[int], *, top: int
    ) -> Exchange[list[TokenDistribution]]:
        """Score each position with one request: only the next token has probabilities. The prefix is cached."""
        complete = (yield from self.tokenize(model, " a"))[-1]  # an incomplete UTF-8 character gets no probabilities
        found = []
        for at in positions:
            body = {"prompt": list(tokens[:at]), "n_predict": 1, "cache_prompt": True, "temperature": 0}
            body |= {"logit_bias": [[complete, _FORCE_BIAS]]}  # reported probabilities ignore the bias
            likely = _likely((yield EngineRequest("/completion", body | {"n_probs": top})))
            longest, logprob = likely, dict(likely).get(tokens[at])
            for count in _WIDER_TOP:
                if logprob is None:
                    longest = _likely((yield EngineRequest("/completion", body | {"n_probs": count})))
                    logprob = dict(longest).get(tokens[at])
            found.append(TokenDistribution(longest[-1][1] if logprob is None else logprob, likely))
        return found

    def answer(self, model: str, tokens: Sequence[int], *, max_tokens: int, top: int) -> Exchange[Answer]:
        """Complete with one request."""
        body = {"prompt": list(tokens), "n_predict": max_tokens, "temperature": 0, "n_probs": top}
        answer = yield EngineRequest("/completion", body | {"return_tokens": True})
        steps = answer.get("completion_probabilities", [])
        written = tuple(one["id"] for one in steps)
        distributions = tuple(TokenDistribution(one["logprob"], _best_first(one["top_logprobs"])) for one in steps)
        return Answer(written, distributions, answer["content"])

    def files(self, deployment: Deployment[LlamaCppConfig]) -> dict[str, str]:
        """Return the local files that the config refers to, by knob."""
        config = deployment.config
        named = {f"lora[{i}]": path for i, path in enumerate(config.lora)}
        named |= {f"lora_scaled[{i}]": item.rpartition(":")[0] for i, item in enumerate(config.lora_scaled)}
        singles = ("spec_draft_model", "chat_template_file")
        return named | {knob: path for knob in singles if (path := getattr(config, knob))}

    def derived(self, deployment: Deployment[LlamaCppConfig], *, model: Model) -> dict[str, Any]:
        """Return how the context is divided among the slots, unless they share one KV cache."""
        config = deployment.config
        slots = 1 if config.kv_unified or config.parallel is None else config.parallel
        per_slot = (config.ctx_size or 0) // slots
        return {
            "slots": slots,
            "context_per_slot": per_slot,
            "max_ctx_size": slots * (model.context_tokens or 0),
        }

    def footprint(self, deployment: Deployment[LlamaCppConfig], *, model: Model, host: Host) -> Footprint:
        """Estimate weights (the file size), the KV cache of the whole context, and the compute buffer."""
        config = deployment.config
        elements = model.kv_elements_per_token()
        k, v = (_CACHE_BYTES[t or "f16"] for t in (config.cache_type_k, config.cache_type_v))
        per_token = elements * (k + v) / 2 if elements else None
        context = config.ctx_size or model.context_tokens
        ubatch = config.ubatch_size or 512
        kv = int(per_token * context) if per_token and context else None
        activations = 4 * ubatch * ((model.vocabulary or 0) + 8 * (model.hidden or 0))
        offloaded = int(_offloaded(config, model) * ((model.weight_bytes or 0) + (kv or 0)))
        ways = _gpus_used(config, host, offloaded, activations)
        return Footprint(
            weights_bytes=model.weight_bytes,
            kv_bytes=kv,
            kv_bytes_per_token=per_token,
            activations_bytes=activations,
            overhead_bytes=150 * 2**20,
            gpu_ways=ways,
            gpu_free_bytes=offloaded // ways + activations if ways else 0,
            growth_bytes=(8192 if config.cache_ram is None else max(config.cache_ram, 0)) * 2**20,
            lower=("ctx_size", "cache_type_k/cache_type_v (q8_0 halves the KV cache)", "ubatch_size"),
        )

    def command(self, deployment: Deployment[LlamaCppConfig], *, installation: Installation, port: int) -> Command:
        """Write all knobs as long options; enable metrics and disable the web UI."""
        config = deployment.config
        argv = [*installation.program, *_model_options(deployment.variant.source)]
        argv += ["--host", deployment.placement.host, "--port", str(port), "--metrics", "--no-ui"]
        if config.alias is None:
            argv += ["--alias", deployment.served_name]
        return Command(argv=(*argv, *knobs.arguments(config)), env=knobs.environment(config))

    def gauges(self, pages: Mapping[str, str]) -> Gauges:
        """Read /metrics; prefix queries are computed plus cached prompt tokens, KV use comes from /slots."""
        read = rules.gauges(rules.facts(self.name).gauges, pages.get("/metrics", ""))
        changes: dict[str, Any] = {}
        if read.prompt_tokens is not None and read.prefix_hits_tokens is not None:
            total = read.prompt_tokens + read.prefix_hits_tokens
            changes = {"prompt_tokens": total, "prefix_queries_tokens": total}
        try:
            slots = plain_data.parse_json(pages.get("/slots", ""))
            used = sum(slot.get("n_prompt_tokens", 0) for slot in slots if slot.get("is_processing"))
            capacity = sum(slot["n_ctx"] for slot in slots)
            changes["kv_use"] = min(1.0, max(0.0, used / capacity))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            pass  # /slots is disabled or was not read: the gauge is unknown
        return read.model_copy(update=changes)


def _kv_format(config: LlamaCppConfig) -> str:
    """Return the KV format: one name, or K/V if they differ."""
    k, v = config.cache_type_k or "f16", config.cache_type_v or "f16"
    return k if k == v else f"{k}/{v}"


def _offloaded(config: LlamaCppConfig, model: Model) -> float:
    """Return the share of the layers that are on GPUs; by default all that fit."""
    layers = config.n_gpu_layers
    return min(1.0, layers / (model.layers + 1)) if isinstance(layers, int) and layers >= 0 and model.layers else 1.0


def _gpus_used(config: LlamaCppConfig, host: Host, offloaded_bytes: int, activations_bytes: int) -> int:
    """Return how many GPUs hold the offloaded layers: those that the config names, else the fewest with the memory."""
    if not host.gpus or not offloaded_bytes or config.device == ("none",):
        return 0
    if config.split_mode == "none":
        return 1
    if named := len(config.device) or len(config.tensor_split):
        return named
    usable = _GPU_SHARE * min(gpu.memory_bytes for gpu in host.gpus) - activations_bytes
    return min(len(host.gpus), math.ceil(offloaded_bytes / usable)) if usable > 0 else len(host.gpus)


_GPU_SHARE = 0.9  # of a GPU's memory; the rest is for the CUDA context and uneven layers
_FORCE_BIAS = 100.0  # logits; makes the biased token the next one
_WIDER_TOP = (4000, 10**6)  # n_probs for a token outside the top; the second is the whole vocabulary


def _likely(answer: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    return _best_first(answer["completion_probabilities"][0]["top_logprobs"])


def _model_options(source: str) -> tuple[str, ...]:
    """Return the options that name the model; only builds with HTTPS, such as the container image, take a hub id."""
    found = hub_id.parse(source)
    if found is None:
        return ("--model", source)
    return ("--hf-repo", found.repo, *(("--hf-file", found.file) if found.file else ()))


def _best_first(logprobs: list[dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(((one["id"], one["logprob"]) for one in logprobs), key=lambda one: -one[1]))


# AMX is disabled: GCC 12 drops the stores of llama.cpp's tile configuration, so that the first tile instruction is
# illegal even on a CPU and kernel that support AMX.
_TOOLS = ("llama-server", "llama-quantize", "llama-perplexity", "llama-imatrix")
_COMPILE_CORE_MIN = 44  # proofs/engines-from-nothing: 22 minutes on 2 cores
_X86_OPTIONS = {
    "SSE42": {"sse4_2"}, "AVX": {"avx"}, "AVX2": {"avx2"}, "BMI2": {"bmi2"}, "FMA": {"fma"}, "F16C": {"f16c"},
    "AVX_VNNI": {"avx_vnni"}, "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    "AVX512_VBMI": {"avx512vbmi"}, "AVX512_VNNI": {"avx512_vnni"}, "AVX512_BF16": {"avx512_bf16"},
}  # fmt: skip


# Without a compiler, zig from the `ziglang` wheel is used, through four wrapper programs.
_WRAP_ZIG = """
import pathlib, sys
for word in ("cc", "c++", "ar", "ranlib"):
    path = pathlib.Path(sys.executable).with_name("zig-" + word)
    path.write_text(f'#!/bin/sh\\nexec {sys.executable} -m ziglang {word} "$@"\\n')
    path.chmod(0o755)
"""


def _usable(host: Host) -> frozenset[str]:
    """Return the instruction sets that a build for a host uses."""
    groups = [needed for needed in _X86_OPTIONS.values() if needed <= host.instruction_sets]
    return frozenset[str]().union(*groups) if host.machine == "x86_64" else frozenset()


def _build_options(host: Host) -> list[str]:
    """Return cmake options; instruction sets are those that the kernel lists, not the compiler's guess."""
    options = {
        "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "GGML_CCACHE": "OFF",
        "CMAKE_MAKE_PROGRAM": "{home}/env/bin/ninja",
    }  # fmt: skip
    if host.compiler is None:
        names = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
        options |= {f"CMAKE_{key}": f"{{home}}/env/bin/zig-{word}" for key, word in names.items()}
        options["GGML_OPENMP"] = "OFF"
    if host.gpus and host.nvcc:
        options["GGML_CUDA"] = "ON"
    if host.machine == "x86_64":
        options["GGML_NATIVE"] = "OFF"
        for name, needed in _X86_OPTIONS.items():
            options[f"GGML_{name}"] = "ON" if needed <= host.instruction_sets else "OFF"
    return [f"-D{key}={value}" for key, value in options.items()]


ENGINE = LlamaCpp()
