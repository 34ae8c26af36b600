"""Where llama.cpp puts a model: its layers on devices, its KV cache beside them, and what does not fit."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from powerband.core.model import Model
from powerband.testing.lab.gguf_files import GgufFile
from powerband.testing.lab.world import LabDevice

CONTEXT_BYTES = 350 * 2**20  # CUDA's own, on each device
_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
               "q4_0": 18 / 32, "iq4_nl": 18 / 32}  # fmt: skip
_MARGIN_BYTES = 2**30  # that --fit leaves free on each device
_LEAST_FIT_TOKENS = 4096
ALL_LAYERS, AUTO_LAYERS = -2, -1


@dataclass(frozen=True)
class Layout:
    """The bytes that go to each device; what is not listed stays in the memory of the host."""

    weights_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    compute_bytes: tuple[int, ...]
    host_weights_bytes: int
    host_kv_bytes: int

    def total_bytes(self, index: int) -> int:
        """Return all that one device must hold, with CUDA's own memory."""
        return self.weights_bytes[index] + self.kv_bytes[index] + self.compute_bytes[index] + CONTEXT_BYTES


@dataclass(frozen=True)
class Placement:
    """The choices that decide where a model goes."""

    context_tokens: int  # of all slots
    context_given: bool
    gpu_layers: int
    devices: tuple[LabDevice, ...]
    shares: tuple[float, ...]  # of the layers, by device
    kv_types: tuple[str, str]
    kv_offload: bool
    ubatch: int
    experts_on_host: int  # layers whose experts stay in the memory of the host
    fixed: str  # why --fit must not move layers; empty: it may


def layout(file: GgufFile, placement: Placement) -> Layout:
    """Return the bytes on each device."""
    model = file.model
    depth = model.layers or 1
    wanted = depth + 1 if placement.gpu_layers < 0 else placement.gpu_layers
    first = max(depth + 1 - wanted, 0)  # layers from this one are on devices; the output is the last
    owners = {layer: _owner(layer - first, depth + 1 - first, placement.shares) for layer in range(first, depth + 1)}
    count = len(placement.devices)
    weights, kv, host_weights, host_kv = [0] * count, [0] * count, 0, 0
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight" and file.header["tied"] and depth in owners and count:
            weights[owners[depth]] += tensor.size_bytes  # the output is a copy of it
        layer = tensor.layer if tensor.layer is not None else (-1 if tensor.name.startswith("token_embd") else depth)
        on_host = "_exps." in tensor.name and 0 <= layer < placement.experts_on_host
        if layer in owners and count and not on_host:
            weights[owners[layer]] += tensor.size_bytes
        else:
            host_weights += tensor.size_bytes
    per_layer = kv_bytes(model, placement.context_tokens, placement.kv_types) // depth
    for layer in range(depth):
        if layer in owners and count and placement.kv_offload:
            kv[owners[layer]] += per_layer
        else:
            host_kv += per_layer
    inner = 4 * placement.ubatch * (8 * (model.hidden or 0) + 2 * (model.feed_forward or 2 * (model.hidden or 0)))
    compute = [inner if one else 0 for one in weights]
    if count and depth in owners:
        compute[owners[depth]] += 4 * placement.ubatch * (model.vocabulary or 0)
    return Layout(tuple(weights), tuple(kv), tuple(compute), host_weights, host_kv)


def host_bytes() -> int:
    """Return the memory of this machine, or of the simulated host."""
    path = Path(os.environ.get("POWERBAND_SYSTEM_ROOT", "/")) / "proc/meminfo"
    facts = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(facts["MemTotal"].split()[0])


def fitted(file: GgufFile, placement: Placement, free_bytes: Sequence[int], host_bytes: int) -> tuple[Placement, str]:
    """Return the placement that --fit makes, and what it says if it cannot make the model fit."""

    def fits(one: Placement) -> bool:
        found = layout(file, one)
        if not placement.devices:
            return found.host_weights_bytes + found.host_kv_bytes + _MARGIN_BYTES <= host_bytes
        return all(found.total_bytes(at) + _MARGIN_BYTES <= free for at, free in enumerate(free_bytes))

    if fits(placement):
        return placement, ""
    if not placement.context_given:
        low, high = min(_LEAST_FIT_TOKENS, placement.context_tokens), placement.context_tokens
        if fits(replace(placement, context_tokens=low)):
            while high - low > 256:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(replace(placement, context_tokens=middle)) else (low, middle)
            return replace(placement, context_tokens=low // 256 * 256), ""
        placement = replace(placement, context_tokens=low)
    if not placement.devices:
        return placement, "was unable to fit model into system memory by reducing context, abort"
    if placement.gpu_layers != AUTO_LAYERS:
        return placement, f"n_gpu_layers already set by user to {placement.gpu_layers}, abort"
    if placement.fixed:
        return placement, f"{placement.fixed}, abort"
    for layers in range((file.model.layers or 1) + 1, 0, -1):
        if fits(replace(placement, gpu_layers=layers)):
            return replace(placement, gpu_layers=layers), ""
    return replace(placement, gpu_layers=0), ""


def kv_bytes(model: Model, tokens: int, types: tuple[str, str]) -> int:
    """Return the bytes of the KV cache."""
    elements = model.shape.kv_elements(tokens) if model.shape else tokens * (model.kv_elements_per_token() or 0)
    return math.ceil(elements / 2 * sum(_TYPE_BYTES[one] for one in types))


def shares(split: Sequence[float], free_bytes: Sequence[int]) -> tuple[float, ...]:
    """Return each device's share of the layers: as given, else by free memory."""
    given = [*split, *[0.0] * len(free_bytes)][: len(free_bytes)]
    weights = given if any(given) else [float(one) for one in free_bytes]
    return tuple(one / (sum(weights) or 1.0) for one in weights)


def _owner(position: int, count: int, parts: Sequence[float]) -> int:
    """Return the device of a layer by its position among those on devices."""
    reached = 0.0
    for index, part in enumerate(parts):
        reached += part
        if position / max(1, count) < reached - 1e-9:
            return index
    return max(0, len(parts) - 1)


def experts_on_host(given: Mapping[str, bool | str], depth: int) -> int:
    """Return in how many layers, from the first, the experts stay in the memory of the host."""
    if given.get("cpu_moe"):
        return depth
    return int(given.get("n_cpu_moe") or 0)
