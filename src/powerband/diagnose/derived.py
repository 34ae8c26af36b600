"""What follows from an observation: names that rules use in conditions and in the values they propose."""

from __future__ import annotations

import math
from typing import Any

from powerband import engines
from powerband.core.diagnosis import Observation
from powerband.core.model import Model
from powerband.diagnose.roofline import StepModel

_HEADROOM = 1.25  # of a proposed context over the longest sequence seen
_GPU_SHARE = 0.95  # of a GPU's memory, which vLLM takes at most
_DEFAULT_GPU_SHARE = 0.92
_CHUNK = 8192


def names(observation: Observation, model: Model | None, found: StepModel | None) -> dict[str, Any]:
    """Return everything that a rule can name; what is not known is missing or None."""
    one = observation
    known: dict[str, Any] = {**one.logged, **one.settings}
    known |= {key: value for key, value in one if key not in ("settings", "logged") and value is not None}
    for part in (_demand, _memory, _context, _chunks, _threads, _devices):
        known |= part(one)
    known["emulates_16_bit"] = _emulates_16_bit(found)
    known["is_nvfp4"] = _mentions(one, "nvfp4") or one.settings.get("quantization") in ("modelopt_fp4", "nvfp4")
    if model is not None:
        known |= {"model_experts": model.experts or 0, "model_layers": model.layers}
    known["layers_on_gpu"] = one.logged.get("offloaded_layers", one.settings.get("n_gpu_layers"))
    known["layers_of_model"] = one.logged.get("model_layers_total", known.get("model_layers"))
    return known


def _demand(one: Observation) -> dict[str, Any]:
    """Return how many requests want to run at once, and how many may."""
    demand = (one.running or 0.0) + (one.waiting_max or 0.0)
    fits = max(1.0, one.kv_sequences or 1e9) if one.engine == "vllm" else 1e9
    wanted = int(min(2 ** math.ceil(math.log2(max(2.0, demand))), max(2.0, fits)))
    per_slot = one.context_limit or 0.0
    shared = one.settings.get("kv_unified") is True
    replicas = math.ceil(demand / one.running) if one.running else None
    return {
        "wanted_sequences": wanted,
        "wanted_slots_context": int(wanted * per_slot) if per_slot and not shared else None,
        "wanted_replicas": float(replicas) if replicas else None,
    }


def _memory(one: Observation) -> dict[str, Any]:
    """Return a larger KV cache, by the setting that now decides its size."""
    needed = (one.running or 0.0) + (one.waiting_max or 0.0)
    factor = max(2, math.ceil(needed / one.kv_sequences)) if one.kv_sequences else 2
    size, space = one.settings.get("kv_cache_memory_bytes"), one.settings.get("VLLM_CPU_KVCACHE_SPACE")
    share = one.settings.get("gpu_memory_utilization") or _DEFAULT_GPU_SHARE
    on_gpu = bool(one.gpus) or (not one.local and one.logged.get("device") != "cpu")
    decided = size is not None or space is not None
    return {
        "wanted_kv_bytes": factor * size if isinstance(size, int) else None,
        "wanted_kv_gib": factor * space if isinstance(space, int) else None,
        "wanted_gpu_share": _GPU_SHARE if on_gpu and not decided and float(share) < _GPU_SHARE else None,
    }


def _context(one: Observation) -> dict[str, Any]:
    known: dict[str, Any] = {"given_context": one.settings.get("ctx_size") or one.logged.get("context_total")}
    if one.longest_tokens:
        per_slot = math.ceil(_HEADROOM * one.longest_tokens / 256) * 256
        known["wanted_total_context"] = int(per_slot * (one.sequence_limit or 1))
    return known


def _chunks(one: Observation) -> dict[str, Any]:
    present = one.settings.get("max_num_batched_tokens") or one.settings.get("ubatch_size")
    wanted = _CHUNK if one.gpus else 2048
    return {"wanted_chunk": wanted, "wanted_chunk_now": present if isinstance(present, int) else None}


def _threads(one: Observation) -> dict[str, Any]:
    """Return the threads that compute, the cores that they have, and how many there should be."""
    known: dict[str, Any] = {"reserved_cores": 0.0 if one.settings.get("VLLM_CPU_OMP_THREADS_BIND") else 1.0}
    if one.hardware_threads and one.physical_cores:
        known["threads_per_core"] = one.hardware_threads / one.physical_cores
    threads = one.settings.get("threads")
    known["computing_threads"] = float(threads) if isinstance(threads, int) else one.compute_threads
    if isinstance(threads, int) and one.engine == "llamacpp":
        known["threads"] = threads
    elif one.engine == "llamacpp" and isinstance(one.logged.get("threads"), int):
        known["threads"] = one.logged["threads"]
        known["computing_threads"] = float(one.logged["threads"])
    known["computing_cores"] = one.physical_cores if one.engine == "llamacpp" else one.bound_cores
    if one.physical_cores:
        usable = max(1, math.floor(min(one.physical_cores, one.cpu_quota or 1e9)))
        known["wanted_threads"] = usable
        known["wanted_binding"] = f"0-{usable - 1}" if usable > 1 else "0"
    elif one.cpu_quota:
        known["wanted_threads"] = max(1, math.floor(one.cpu_quota))
    return known


def _devices(one: Observation) -> dict[str, Any]:
    name = one.gpu_name or one.logged.get("device_name")
    on_cuda = bool(one.logged.get("cuda")) or bool(one.gpus) or "nvidia" in str(name).lower()
    return {
        "gpu_name": name,
        "gpu_text": f"; the GPU is {name}" if name else "",
        "is_a100": "a100" in str(name).lower() or "a800" in str(name).lower(),
        "is_mig": "mig" in str(name).lower(),
        "on_cuda": on_cuda,
    }


def _emulates_16_bit(found: StepModel | None) -> bool | None:
    if found is None or not hasattr(found.deployment.config, "dtype"):
        return None
    adapter = engines.get(found.deployment.engine)
    return adapter.settings_of(found.deployment, model=found.model, host=found.host).emulates_16_bit


def _mentions(one: Observation, word: str) -> bool:
    return word in (one.model or "").lower() or bool(one.logged.get(word))
