"""What vLLM holds on each device: weights, activations and CUDA graphs; the rest of its share is the KV cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from powerband.core.model import Model
from powerband.testing.lab.vllm_config import VllmSettings
from powerband.testing.lab.vllm_log import Refused

GIB = 2**30
CONTEXT_BYTES = 500 * 2**20  # CUDA's own, for each process on a device
_GRAPH_BYTES = 900 * 2**20
_CPU_PROCESS_BYTES = 900 * 2**20
_KV_BYTES = {"float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 0.5625,
             "nvfp4_4over6": 0.5625, "turboquant_k8v4": 0.77, "turboquant_4bit_nc": 0.52, "turboquant_k3v4_nc": 0.47,
             "turboquant_3bit_nc": 0.41}  # fmt: skip
_PER_HEAD_KV_BYTES = {"int4_per_token_head": 0.5, "int8_per_token_head": 1.0, "fp8_per_token_head": 1.0}


@dataclass(frozen=True)
class Demand:
    """What one device must hold."""

    weights_bytes: int
    activations_bytes: int  # at the peak of a step
    graphs_bytes: int
    block_bytes: int  # of one block of the KV cache, in all layers on the device


def demand(settings: VllmSettings, files_bytes: int, *, on_gpu: bool) -> Demand:
    """Return what each device must hold, for the weights in the model's files."""
    model, batch = settings.model, settings.max_num_batched_tokens
    hidden, inner = model.hidden or 0, model.feed_forward or 0
    weights = weights_bytes(settings, files_bytes)
    width = 4 if settings.dtype == "float32" else 2
    activations = width * batch * (6 * hidden + 3 * inner // settings.tensor)
    activations += 8 * min(settings.max_num_seqs, batch) * (model.vocabulary or 0) // settings.tensor
    return Demand(
        weights_bytes=_share(weights, settings),
        activations_bytes=activations,
        graphs_bytes=_GRAPH_BYTES if on_gpu and not settings.eager else 0,
        block_bytes=math.ceil(settings.block_size * kv_bytes_per_token(settings)),
    )


def weights_bytes(settings: VllmSettings, files_bytes: int) -> int:
    """Return the bytes of all weights in memory, after quantization or conversion while they load."""
    model, shape = settings.model, settings.model.shape
    if settings.online_bytes is not None and shape:
        embeddings = shape.embedding + shape.head
        return int(2 * embeddings + settings.online_bytes * (shape.parameters - embeddings))
    widths = {"float32": 4, "float": 4}
    if model.quantization:
        return files_bytes
    return files_bytes * widths.get(settings.dtype, 2) // widths.get(model.dtype or "", 2)


def active_bytes(settings: VllmSettings, files_bytes: int) -> float:
    """Return the weights that one token reads, over all devices."""
    shape, total = settings.model.shape, weights_bytes(settings, files_bytes)
    return total * shape.active_parameters / shape.parameters if shape and shape.experts else float(total)


def kv_bytes_per_token(settings: VllmSettings) -> float:
    """Return the bytes of one token in the KV cache of one device."""
    model, length = settings.model, settings.max_model_len
    if model.shape is None:
        elements = (model.kv_elements_per_token() or 0) / min(settings.tensor, model.kv_heads or 1)
    else:
        elements = sum(
            one.count * one.kv * min(length, one.window or length) / length / min(settings.tensor, one.kv_heads)
            for one in model.shape.layers
        )
    return elements / settings.pipeline * _element_bytes(settings, model)


def _element_bytes(settings: VllmSettings, model: Model) -> float:
    if settings.kv_dtype in _PER_HEAD_KV_BYTES:  # each head vector has a scale of 4 bytes
        return _PER_HEAD_KV_BYTES[settings.kv_dtype] + 4 / (model.head_dim or 128)
    return _KV_BYTES.get(settings.kv_dtype, 4.0 if settings.dtype == "float32" else 2.0)


def _share(weights: int, settings: VllmSettings) -> int:
    """Return the weights of one device; experts are spread over the replicas of data parallelism as well."""
    shape, ways = settings.model.shape, settings.tensor * settings.pipeline
    if shape is None or not shape.experts:
        return weights // ways
    experts = sum(one.count * one.expert * one.experts for one in shape.layers) / shape.parameters
    return int(weights * (1 - experts) / ways + weights * experts / (ways * settings.data))


def blocks(settings: VllmSettings, demand: Demand, available_bytes: int) -> int:
    """Return the blocks that fit into the memory for the KV cache; raises Refused if it is too small."""
    if available_bytes <= 0:
        raise Refused(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            process="EngineCore",
        )
    if settings.blocks is not None:
        available_bytes = settings.blocks * demand.block_bytes
    count, needed = available_bytes // demand.block_bytes, -(-settings.max_model_len // settings.block_size)
    if needed > count:
        length = count * settings.block_size
        estimate = f"Based on the available memory, the estimated maximum model length is {length}. " if length else ""
        raise Refused(
            f"To serve at least one request with the model's max seq len ({settings.max_model_len}), "
            f"({gib(needed * demand.block_bytes)} GiB KV cache is needed, which is larger than the available KV cache "
            f"memory ({gib(available_bytes)} GiB). {estimate}Try increasing `gpu_memory_utilization` (which also "
            "controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
            process="EngineCore",
        )
    return count


def gib(size_bytes: float) -> str:
    """Return a size as vLLM prints it."""
    return f"{round(size_bytes / GIB, 2)}"


def node_memory(node: int = 0) -> tuple[int, int]:
    """Return the total and the available memory of a NUMA node of this machine, as vLLM's CPU build reads them."""
    path = Path(os.environ.get("POWERBAND_SYSTEM_ROOT", "/")) / Path(f"sys/devices/system/node/node{node}/meminfo")
    if not path.exists():
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    facts = {line.split()[2].rstrip(":"): 1024 * int(line.split()[3]) for line in path.read_text().splitlines()}
    return facts["MemTotal"], sum(facts[one] for one in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def check_cpu_start(settings: VllmSettings) -> None:
    """Refuse a share of this machine's memory that is not free, as vLLM's CPU build does."""
    total, available = node_memory()
    share = math.ceil(total * settings.utilization)
    if settings.kv_bytes is None and share > available:
        raise Refused(
            f"Available memory on node 0 ({gib(available)}/{gib(total)} GiB) on startup is less than desired CPU "
            f"memory utilization ({settings.utilization}, {gib(share)} GiB). On the CPU backend, the "
            "`--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name).",
            process="Worker",
        )


def cpu_kv_bytes(settings: VllmSettings, demand: Demand) -> int:
    """Return the memory for the KV cache on a CPU; raises Refused if it is not free."""
    total, available = node_memory()
    share = math.ceil(total * settings.utilization)
    asked = settings.kv_bytes
    if asked is None:
        asked = share - demand.weights_bytes - demand.activations_bytes - _CPU_PROCESS_BYTES
    if 0 < asked <= available:
        return asked
    said = gib(asked) if settings.kv_bytes is not None else f"{gib(asked)}/{gib(share)}"
    raise Refused(
        f"Available memory on node 0 ({gib(available)}/{gib(total)} GiB) on kv cache allocation is less than requested "
        f"memory for kv ({said} GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory "
        "used by other processes.",
        process="Worker",
    )


def piece_bytes(settings: VllmSettings) -> int:
    """Return the size of one allocation of weights: the largest matrix of a layer on one device."""
    model = settings.model
    return max(2 * 2**20, 4 * (model.hidden or 0) * (model.feed_forward or 0) // settings.tensor)


def precision(settings: VllmSettings) -> str:
    """Return the precision of the weights, by the names of the lab's step times."""
    if settings.online_bytes is not None:
        return "fp8" if settings.online_bytes >= 1 else "fp4"
    formats = {"fp8": "fp8", "float8": "fp8", "int8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4", "float4": "fp4",
               "awq": "int4", "gptq": "int4", "int4": "int4"}  # fmt: skip
    return formats.get(settings.model.weight_format or "", "bf16")
