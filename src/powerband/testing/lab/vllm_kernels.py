"""What vLLM refuses when its workers choose kernels: data types and block sizes of the device."""

from __future__ import annotations

from powerband.testing.lab.vllm_config import VllmSettings
from powerband.testing.lab.vllm_log import Refused
from powerband.testing.lab.world import LabDevice

_PLAIN = ("auto", "float16", "bfloat16")
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_PER_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
_TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")


def check_gpu(settings: VllmSettings, device: LabDevice, *, process: str) -> None:
    """Refuse the formats for which no kernel runs on a GPU."""
    capability = float(device.capability)
    if settings.given.get("dtype") == "bfloat16" and capability < 8.0:
        raise Refused(
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your "
            f"{device.name} GPU has compute capability {device.capability}. You can use float16 instead by explicitly "
            "setting the `dtype` flag in CLI, for example: --dtype=half.",
            process=process,
        )
    able = _PLAIN + _PER_HEAD + _TURBOQUANT + (_FP8 if capability >= 8.0 else ())
    able += ("nvfp4", "nvfp4_4over6") if 10.0 <= capability < 11.0 else ()
    shape = settings.model.shape
    able += ("fp8_ds_mla",) if shape and all(one.kv_heads == 1 for one in shape.layers) else ()
    reason = ""
    if settings.kv_dtype not in able:
        reason = "kv_cache_dtype not supported"
    elif settings.block_size % 16:
        reason = "block_size not supported"
    if reason:
        raise Refused(
            "No valid attention backend found for cuda with AttentionSelectorConfig("
            f"head_size={settings.model.head_dim}, dtype=torch.{settings.dtype}, kv_cache_dtype={settings.kv_dtype}, "
            f"block_size={settings.block_size}). Reasons: "
            f"{{{', '.join(f'{name}: [{reason}]' for name in _BACKENDS)}}}.",
            process=process,
        )


def check_threads(settings: VllmSettings, *, on_gpu: bool) -> None:
    """Refuse more workers on a CPU than it has NUMA nodes, unless the user binds their threads."""
    workers = settings.tensor * settings.pipeline
    lists = settings.thread_binding.split("|")
    if on_gpu or settings.thread_binding == "nobind":
        return
    if settings.thread_binding == "auto" and workers > 1:
        raise Refused(
            f"Not enough allowed NUMA nodes to bind threads of {workers} local CPUWorkers. Allowed NUMA nodes are [0]. "
            "Please try to bind threads manually or decrease DP/TP/PP.",
            error="AssertionError",
            process="EngineCore",
        )
    if settings.thread_binding != "auto" and len(lists) != workers:
        raise Refused(
            f"Given number of CPU id list {lists} doesn't match local world size {workers}.",
            error="AssertionError",
            process="EngineCore",
        )


def check_cpu_quantization(settings: VllmSettings, *, on_gpu: bool, process: str) -> None:
    """Refuse weights that the CPU build cannot quantize while they load."""
    if not on_gpu and settings.online_bytes is not None and settings.quantization in ("fp8", "fp8_per_tensor"):
        raise Refused(
            "_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s). Declaration: "
            "_C::static_scaled_fp8_quant() -> ()",
            error="RuntimeError",
            process=process,
        )


def check_block_size(settings: VllmSettings, *, on_gpu: bool, process: str) -> None:
    """Refuse blocks that attention on a CPU cannot read."""
    if not on_gpu and settings.block_size % 32:
        raise Refused(f"No common block size for {settings.block_size} (CPU_ATTN: [MultipleOf(32)]).", process=process)
