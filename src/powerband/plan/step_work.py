"""The work of one engine step on each device: bytes, operations and collectives. No times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from powerband.core.scheme import Scheme
from powerband.core.shape import Layers, Shape


@dataclass(frozen=True)
class Split:
    """How one replica is distributed over devices: tensor, pipeline, expert and data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # groups of devices that the routed experts are divided over
    data: int = 1  # groups of devices whose attention serves different requests

    @property
    def devices(self) -> int:
        """Return the devices per replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_slices(self) -> int:
        """Return over how many devices each expert is split."""
        return max(1, self.tensor * self.data // self.expert)

    def __str__(self) -> str:
        parts = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data, "ep": self.expert}
        return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "1 device"


class Batch(NamedTuple):
    """The tokens of one step, over all devices of a replica."""

    prefill_tokens: float = 0.0
    prefill_context: float = 0.0  # mean number of tokens that a prefill token attends to
    decodes: float = 0.0  # sequences that decode
    decode_context: float = 0.0  # mean number of tokens of those sequences
    finished_prompts: float = 0.0  # prompts whose prefill ends in this step: they need the output embedding
    tokens_per_decode: float = 1.0  # more than 1 if draft tokens are verified

    @property
    def tokens(self) -> float:
        """Return the tokens that the layers process."""
        return self.prefill_tokens + self.decodes * self.tokens_per_decode


class Work(NamedTuple):
    """The work of one step on the busiest device."""

    weight_bytes: float
    kv_bytes: float
    flops: float  # multiplications with weights
    attention_flops: float
    all_reduce_bytes: float
    all_to_all_bytes: float  # tokens sent to experts on other devices
    collectives: float  # number of collective operations
    layers: float
    sequences: float


class Steps:
    """Computes the work of steps for one model, scheme, KV format and split."""

    def __init__(self, shape: Shape, scheme: Scheme, split: Split, *, kv_bytes: float = 2.0) -> None:
        self.shape, self.scheme, self.split, self.kv_bytes = shape, scheme, split, kv_bytes
        tensor, slices = split.tensor, split.expert_slices
        self._dense_bytes = self._dense_flops = self._expert_flops = self._scores = 0.0
        self._experts: list[tuple[float, float]] = []  # (expert bytes on this device, share of experts a token uses)
        windows: dict[float, float] = {}  # KV bytes per token by sliding window
        self._routed_layers = 0
        for one in shape.layers:
            dense = one.attention + one.dense
            self._dense_bytes += one.count * (dense * scheme.linear_bits + one.router * scheme.router_bits) / 8 / tensor
            self._dense_flops += 2.0 * one.count * (dense + one.router) / tensor
            if one.experts:
                each = one.expert * scheme.expert_bits() / 8 / slices
                self._experts.append((one.count * each * one.experts / split.expert, one.active / one.experts))
                self._expert_flops += 2.0 * one.count * one.active * one.expert / (split.expert * slices)
                self._routed_layers += one.count
            share = _kv_share(one, tensor)
            window = float(one.window or math.inf)
            windows[window] = windows.get(window, 0.0) + one.count * one.kv * kv_bytes * share
            self._scores += 2.0 * one.count * one.scores / tensor
        self._windows = list(windows.items())
        self._state = 2.0 * shape.state_elements() * 4 / tensor
        self._head_bytes = shape.vocabulary * shape.hidden * scheme.head_bits / 8 / tensor
        self._head_flops = 2.0 * shape.vocabulary * shape.hidden / tensor
        self._pipeline = float(split.pipeline)
        self._kv_token = self.kv_of(1.0) * self._pipeline
        self._depth, self._hidden_bytes = float(shape.depth), shape.hidden * 2.0
        distributed = split.expert > 1 or split.data > 1
        all_to_alls = 2.0 * self._routed_layers if distributed else 0.0
        self._all_reduces = 2.0 * self._depth if tensor > 1 else 0.0
        self._collectives = self._all_reduces + all_to_alls + (self._pipeline - 1)
        active = max((one.active for one in shape.layers), default=0)
        self._all_to_all_bytes = all_to_alls / tensor * min(active, split.expert) * self._hidden_bytes

    def kv_of(self, context: float) -> float:
        """Return the KV-cache bytes of a sequence of this many tokens on the busiest device."""
        cached = sum([each * min(context, window) for window, each in self._windows])
        return (cached + self._state / 2) / self._pipeline

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights on one device."""
        experts = sum(each for each, _ in self._experts)
        embedding = self.shape.embedding * self.scheme.embedding_bits / 8 / self.split.tensor
        return (self._dense_bytes + experts) / self._pipeline + self._head_bytes + (0 if self.shape.tied else embedding)

    def __call__(self, batch: Batch) -> Work:
        """Return the work of a step; pipeline stages run one after another, so their work adds up."""
        data = self.split.data
        total = batch.tokens
        local = total / data
        experts = sum([each * (1 - (1 - share) ** total) for each, share in self._experts])
        outputs = (batch.decodes * batch.tokens_per_decode + batch.finished_prompts) / data
        weights = self._dense_bytes + experts + (self._head_bytes if outputs else 0.0)
        kv = batch.decodes / data * (self.kv_of(batch.decode_context) * self._pipeline + self._state / 2)
        kv += batch.prefill_tokens / data * self._kv_token
        pairs = batch.prefill_tokens * batch.prefill_context
        pairs += batch.decodes * batch.tokens_per_decode * batch.decode_context
        flops = self._dense_flops * local + self._expert_flops * total + self._head_flops * outputs
        tensor = self.split.tensor
        return Work(  # by position, which is faster: a plan makes half a million of these
            weights,
            kv,
            flops,
            self._scores * pairs / data,
            self._all_reduces * 2 * (tensor - 1) / tensor * local * self._hidden_bytes,
            self._all_to_all_bytes * local,
            self._collectives,
            self._depth,
            (batch.decodes + batch.finished_prompts) / data,
        )


def _kv_share(layers: Layers, tensor: int) -> float:
    """Return the share of a layer's KV cache on one device; a KV head cannot be split."""
    return 1 / min(tensor, layers.kv_heads)
