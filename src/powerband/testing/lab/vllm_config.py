"""What vLLM makes of its options and the model's `config.json`, and what it refuses, in its order and its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.core.model import Model, from_config_json
from powerband.testing.lab.flags import Option, Recorded
from powerband.testing.lab.vllm_files import config_json
from powerband.testing.lab.vllm_log import Refused
from powerband.testing.lab.vllm_speculation import speculation
from powerband.testing.lab.world import LabDevice

_ONLINE = {  # quantization of 16-bit weights while they load: bytes per parameter
    "fp8": 1.0, "fp8_per_tensor": 1.0, "fp8_per_block": 1.0, "fp8_per_channel": 1.0, "mxfp8": 1.03,
    "int8_per_channel_weight_only": 1.0, "nvfp4_per_token": 0.5625, "experts_int8": 1.0,
}  # fmt: skip
_FAMILIES = (  # methods that load each other's checkpoints
    {"awq", "auto_awq", "awq_marlin", "humming"},
    {"gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "humming"},
    {"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "humming"},
    {"mxfp4", "gpt_oss_mxfp4"},
)
_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_SCALED_CONTEXT = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_WORDS = {"gt": "greater than", "ge": "greater than or equal to", "lt": "less than", "le": "less than or equal to"}


@dataclass(frozen=True)
class VllmSettings:
    """The settings of an engine whose configuration vLLM accepts."""

    given: Mapping[str, Any]  # the options
    path: Path
    model: Model
    max_model_len: int
    dtype: str
    quantization: str | None
    kv_bytes: int | None
    block_size: int
    tensor: int
    pipeline: int
    data: int
    max_num_seqs: int
    max_num_batched_tokens: int
    speculation: Mapping[str, Any] | None
    thread_binding: str

    @property
    def kv_dtype(self) -> str:
        """Return the format of the KV cache."""
        return self.given.get("kv_cache_dtype") or "auto"

    @property
    def utilization(self) -> float:
        """Return the share of a device's memory to use."""
        return float(self.given.get("gpu_memory_utilization", 0.92))

    @property
    def blocks(self) -> int | None:
        """Return the blocks of the KV cache that the user asks for."""
        return self.given.get("num_gpu_blocks_override")

    @property
    def eager(self) -> bool:
        """Return whether nothing is compiled."""
        return bool(self.given.get("enforce_eager"))

    @property
    def over_nodes(self) -> bool:
        """Return whether Ray places the workers on the nodes of a cluster."""
        return self.given.get("distributed_executor_backend") == "ray"

    @property
    def online_bytes(self) -> float | None:
        """Return the bytes per parameter if 16-bit weights are quantized while they load."""
        return None if self.model.quantization or self.quantization is None else _ONLINE[self.quantization]


def settings(
    given: Mapping[str, Any],
    recorded: Recorded,
    environment: Mapping[str, str],
    *,
    devices: Sequence[LabDevice],
    on_gpu: bool,
) -> VllmSettings:
    """Return the settings for options that the parser accepts; raises Refused. `devices` are the visible ones."""
    if on_gpu and not devices:
        raise Refused(
            "Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on "
            "verbose logging to help debug the issue.",
            error="RuntimeError",
        )
    options = recorded.options
    path = Path(given["model"])
    overrides = given.get("hf_overrides") or {}
    config = config_json(path) | (overrides if isinstance(overrides, dict) else {})
    model = from_config_json(config, source=str(path), weight_bytes=None)
    _within_limits(given, options, "ModelConfig")
    _check_architecture(model, recorded)
    max_model_len = _max_model_len(given.get("max_model_len"), config, environment)
    quantization = _quantization(given.get("quantization"), model, recorded)
    _within_limits(given, options, "CacheConfig")
    tensor, pipeline, data = (given.get(f"{one}_parallel_size") or 1 for one in ("tensor", "pipeline", "data"))
    _within_limits(given, options, "ParallelConfig")
    if given.get("distributed_executor_backend") != "ray":
        _check_world(tensor * pipeline, len(devices), on_gpu=on_gpu)
    drafts = speculation(given, options, model)
    sequences, batched = _batch(given, max_model_len, tensor * pipeline, devices, on_gpu=on_gpu)
    _within_limits(given, options, "SchedulerConfig")
    _check_scheduler(given, sequences, batched, max_model_len)
    _within_limits(given, options, "LoRAConfig")
    _check_whole(given, model, tensor, sequences, batched, drafts)
    if quantization:
        _check_quantization(quantization, model, recorded, devices)
    kv_space = environment.get("VLLM_CPU_KVCACHE_SPACE", "") if not on_gpu else ""
    return VllmSettings(
        given=given,
        path=path,
        model=model,
        max_model_len=max_model_len,
        dtype=_dtype(given.get("dtype") or "auto", model, devices),
        quantization=quantization,
        kv_bytes=int(kv_space) * 2**30 if kv_space else given.get("kv_cache_memory_bytes"),
        block_size=given.get("block_size") or (16 if on_gpu else 128),
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        max_num_seqs=sequences,
        max_num_batched_tokens=batched,
        speculation=drafts,
        thread_binding=environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
    )


def _within_limits(given: Mapping[str, Any], options: Sequence[Option], config: str) -> None:
    for one in options:
        name = one.names[0][2:].replace("-", "_")
        value = given.get(name)
        if one.config != config or value is None:
            continue
        wrong = {
            "gt": one.gt is not None and not value > one.gt,
            "ge": one.ge is not None and not value >= one.ge,
            "lt": one.lt is not None and not value < one.lt,
            "le": one.le is not None and not value <= one.le,
        }
        for limit in (key for key, is_wrong in wrong.items() if is_wrong):
            raise Refused(
                f"{name}\n  Input should be {_WORDS[limit]} {getattr(one, limit):g} "
                f"[type={_WORDS[limit].replace(' or equal to', '_equal').replace(' ', '_')}, input_value={value}, "
                f"input_type={type(value).__name__}]",
                error="ValidationError",
                config=config,
            )


def _check_architecture(model: Model, recorded: Recorded) -> None:
    if recorded.architectures and model.architecture not in recorded.architectures:
        raise Refused(
            f"Model architectures ['{model.architecture}'] are not supported for now. Supported architectures: "
            f"dict_keys({list(recorded.architectures)})",
            config="ModelConfig",
        )


def _max_model_len(asked: int | None, config: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    config = {**config, **config.get("text_config", {})}
    limit = float(config.get("max_position_embeddings") or 2048)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _SCALED_CONTEXT:
        limit *= rope.get("factor") or 1.0
    if asked is None or asked == -1:
        return int(config.get("original_max_position_embeddings") or limit) if kind == "longrope" else int(limit)
    if asked > limit and environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise Refused(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={limit} or model_max_length=None in model's config.json). To allow overriding "
            "this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
            config="ModelConfig",
        )
    if asked < 1:
        raise Refused(
            f"max_model_len must be a positive integer, got int: {asked}. Example: max_model_len=2048",
            config="ModelConfig",
        )
    return asked


def _quantization(asked: str | None, model: Model, recorded: Recorded) -> str | None:
    published = model.quantization
    if asked and published and asked != published and not any({asked, published} <= one for one in _FAMILIES):
        raise Refused(
            f"Quantization method specified in the model config ({published}) does not match the quantization method "
            f"specified in the `quantization` argument ({asked}).",
            config="ModelConfig",
        )
    method = asked or published
    if method and method not in recorded.quantization:
        known = list(recorded.quantization)
        raise Refused(f"Unknown quantization method: {method}. Must be one of {known}.", config="ModelConfig")
    if method in _DEPRECATED:
        raise Refused(
            f"('The quantization method %s is deprecated and will be removed in future versions of vLLM. To bypass, "
            f"set `--allow-deprecated-quantization`.', '{method}')",
            config="ModelConfig",
        )
    return method


def _check_quantization(method: str, model: Model, recorded: Recorded, devices: Sequence[LabDevice]) -> None:
    if model.quantization is None and method not in _ONLINE:
        raise Refused(f"Cannot find the config file for {method}", config="VllmConfig")
    least = recorded.quantization[method]
    for one in devices[:1]:
        capability = int(one.capability.replace(".", ""))
        if capability < least:
            raise Refused(
                f"The quantization method {method} is not supported for the current GPU. Minimum capability: {least}. "
                f"Current capability: {capability}.",
                config="VllmConfig",
            )


def _check_world(world: int, gpus: int, *, on_gpu: bool) -> None:
    if on_gpu and world > gpus:
        raise Refused(
            f"World size ({world}) is larger than the number of available GPUs ({gpus}) in this node. If this is "
            "intentional and you are using:\n- ray, set '--distributed-executor-backend ray'.\n"
            "- multiprocessing, set '--nnodes' appropriately.",
            config="ParallelConfig",
        )


def _dtype(asked: str, model: Model, devices: Sequence[LabDevice]) -> str:
    """Return the format of activations and of weights that are not quantized."""
    names = {"half": "float16", "float": "float32"}
    if asked != "auto":
        return names.get(asked, asked)
    old = any(float(one.capability) < 8.0 for one in devices)
    published = model.dtype or "float32"
    preferred = "float16" if old else "bfloat16"
    return preferred if published == "float32" or (old and published == "bfloat16") else published


def _batch_of_device(device: LabDevice) -> tuple[int, int]:
    if device.memory_bytes >= 160 * 2**30:
        return 1024, 16384
    large = device.memory_bytes >= 70 * 2**30 and "a100" not in device.name.lower()
    return (1024, 8192) if large else (256, 2048)


def _batch(
    given: Mapping[str, Any], max_model_len: int, world: int, devices: Sequence[LabDevice], *, on_gpu: bool
) -> tuple[int, int]:
    """Return max_num_seqs and max_num_batched_tokens with vLLM's defaults, which depend on the device."""
    sequences, tokens = _batch_of_device(devices[0]) if on_gpu else (128 * world, 2048 * world)
    factor = 2 if given.get("performance_mode") == "throughput" else 1
    sequences = given.get("max_num_seqs") or factor * sequences
    if given.get("max_num_batched_tokens") is None:
        tokens *= factor
        if not given.get("enable_chunked_prefill", True):
            tokens = max(tokens, max_model_len)
        tokens = min(tokens, sequences * max_model_len)
    else:
        tokens = given["max_num_batched_tokens"]
    return sequences if given.get("max_num_seqs") else min(sequences, tokens), tokens


def _check_scheduler(given: Mapping[str, Any], sequences: int, batched: int, max_model_len: int) -> None:
    if batched < max_model_len and not given.get("enable_chunked_prefill", True):
        raise Refused(
            f"max_num_batched_tokens ({batched}) is smaller than max_model_len ({max_model_len}). This effectively "
            "limits the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. "
            "Please increase max_num_batched_tokens or decrease max_model_len.",
            config="SchedulerConfig",
        )
    if batched < sequences:
        raise Refused(
            f"max_num_batched_tokens ({batched}) must be greater than or equal to max_num_seqs ({sequences}).",
            config="SchedulerConfig",
        )
    active, threshold = given.get("max_num_active_seqs") or 0, given.get("long_prefill_token_threshold") or 0
    if active > sequences:
        raise Refused(
            f"max_num_active_seqs ({active}) cannot be greater than max_num_seqs ({sequences}).",
            config="SchedulerConfig",
        )
    if threshold > max_model_len:
        raise Refused(
            f"long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len ({max_model_len}).",
            config="SchedulerConfig",
        )


def _check_whole(
    given: Mapping[str, Any], model: Model, tensor: int, sequences: int, batched: int, speculation: Any
) -> None:
    if given.get("enable_lora"):
        loras, cpu = given.get("max_loras") or 1, given.get("max_cpu_loras") or 0
        if cpu and cpu < loras:
            raise Refused(f"max_cpu_loras ({cpu}) must be >= max_loras ({loras}).", config="LoRAConfig")
        if speculation and batched < sequences * (speculation["num_speculative_tokens"] + 1):
            raise Refused("Consider increasing max_num_batched_tokens or decreasing num_speculative_tokens")
    if model.heads and model.heads % tensor:
        raise Refused(
            f"Total number of attention heads ({model.heads}) must be divisible by tensor parallel size ({tensor}).",
            config="VllmConfig",
        )
    if given.get("enable_expert_parallel") and not model.experts:
        raise Refused(
            "Number of experts in the model must be greater than 0 when expert parallelism is enabled.",
            config="VllmConfig",
        )
    if given.get("async_scheduling") and speculation and speculation.get("method") in ("ngram", "medusa"):
        raise Refused(
            "Currently, async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU/DSpark/DFlash kind "
            "of speculative decoding",
            config="VllmConfig",
        )
