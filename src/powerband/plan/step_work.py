"""What one step of an engine moves and computes on each device: bytes, operations, messages. No times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from powerband.core.scheme import Scheme
from powerband.core.shape import Layers, Shape


@dataclass(frozen=True)
class Split:
    """How one replica is spread over devices."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # routed experts are dealt out over so many groups of devices
    data: int = 1  # attention is done by so many groups, each for its own requests

    @property
    def devices(self) -> int:
        """Return the devices of a replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_slices(self) -> int:
        """Return into how many pieces each expert is cut."""
        return max(1, self.tensor * self.data // self.expert)

    def __str__(self) -> str:
        parts = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data, "ep": self.expert}
        return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "1 device"


class Batch(NamedTuple):
    """What one step works on, over all devices of a replica."""

    prefill: float = 0.0  # prompt tokens that are computed
    behind: float = 0.0  # mean tokens of context that each of them looks at
    decodes: float = 0.0  # sequences that get their next token
    context: float = 0.0  # mean tokens that each of them has
    firsts: float = 0.0  # prompts that end in this step, and need the output table
    width: float = 1.0  # tokens of each of the sequences: more than one where drafts are checked

    @property
    def tokens(self) -> float:
        """Return the tokens that pass the layers."""
        return self.prefill + self.decodes * self.width


class Work(NamedTuple):
    """One step's work on the busiest device."""

    weight_bytes: float
    kv_bytes: float
    flops: float  # with weights
    attention_flops: float
    reduce_bytes: float  # sent over the links to add up partial sums
    exchange_bytes: float  # sent to reach experts elsewhere
    rounds: float  # messages that everybody waits for
    layers: float
    sequences: float


class Steps:
    """The work of steps of one model, in one scheme and KV format, split in one way."""

    def __init__(self, shape: Shape, scheme: Scheme, split: Split, *, kv_bytes: float = 2.0) -> None:
        self.shape, self.scheme, self.split, self.kv_bytes = shape, scheme, split, kv_bytes
        own, slices = split.tensor, split.expert_slices
        self._dense_bytes = self._dense_flops = self._expert_flops = self._scores = 0.0
        self._experts: list[tuple[float, float]] = []  # bytes of a group's experts here, share that a token passes
        self._windows: list[tuple[float, int | None]] = []
        self._routed_layers = 0
        for one in shape.layers:
            plain = one.attention + one.dense
            self._dense_bytes += one.count * (plain * scheme.linear_bits + one.router * scheme.router_bits) / 8 / own
            self._dense_flops += 2.0 * one.count * (plain + one.router) / own
            if one.experts:
                each = one.expert * scheme.expert_bits() / 8 / slices
                self._experts.append((one.count * each * one.experts / split.expert, one.active / one.experts))
                self._expert_flops += 2.0 * one.count * one.active * one.expert / (split.expert * slices)
                self._routed_layers += one.count
            share = _kv_share(one, own)
            self._windows.append((one.count * one.kv * kv_bytes * share, one.window))
            self._scores += 2.0 * one.count * one.scores / own
        self._state = 2.0 * shape.state_elements() * 4 / own
        self._head_bytes = shape.vocabulary * shape.hidden * scheme.head_bits / 8 / own
        self._head_flops = 2.0 * shape.vocabulary * shape.hidden / own
        self._pipeline = float(split.pipeline)
        self._kv_token = self.kv_of(1.0) * self._pipeline
        self._depth, self._hidden_bytes = float(shape.depth), shape.hidden * 2.0
        spread = split.expert > 1 or split.data > 1
        exchanges = 2.0 * self._routed_layers if spread else 0.0
        self._sums = 2.0 * self._depth if own > 1 else 0.0
        self._rounds = self._sums + exchanges + (self._pipeline - 1)
        active = max((one.active for one in shape.layers), default=0)
        self._exchange_bytes = exchanges / own * min(active, split.expert) * self._hidden_bytes

    def kv_of(self, context: float) -> float:
        """Return the bytes that a sequence of so many tokens keeps on the busiest device."""
        kept = sum(each * min(context, window or context) for each, window in self._windows)
        return (kept + self._state / 2) / self._pipeline

    @property
    def weight_bytes(self) -> float:
        """Return what one device holds of the weights."""
        experts = sum(each for each, _ in self._experts)
        table = self.shape.embedding * self.scheme.embedding_bits / 8 / self.split.tensor if not self.shape.tied else 0
        return (self._dense_bytes + experts) / self._pipeline + self._head_bytes + table

    def __call__(self, batch: Batch) -> Work:
        """Return the work of a step; a pipeline's stages are passed one after another, so their work adds up."""
        data = self.split.data
        local, whole = batch.tokens / data, batch.tokens
        experts = sum(each * (1 - (1 - share) ** whole) for each, share in self._experts)
        outputs = (batch.decodes * batch.width + batch.firsts) / data
        weights = self._dense_bytes + experts + (self._head_bytes if outputs else 0.0)
        kv = batch.decodes / data * (self.kv_of(batch.context) * self._pipeline + self._state / 2)
        kv += batch.prefill / data * self._kv_token
        attention = self._scores * (batch.prefill * batch.behind + batch.decodes * batch.width * batch.context) / data
        flops = self._dense_flops * local + self._expert_flops * whole + self._head_flops * outputs
        ways = self.split.tensor
        reduce_bytes = self._sums * 2 * (ways - 1) / ways * local * self._hidden_bytes
        return Work(
            weight_bytes=weights,
            kv_bytes=kv,
            flops=flops,
            attention_flops=attention,
            reduce_bytes=reduce_bytes,
            exchange_bytes=self._exchange_bytes * local,
            rounds=self._rounds,
            layers=self._depth,
            sequences=(batch.decodes + batch.firsts) / data,
        )


def _kv_share(layers: Layers, ways: int) -> float:
    """Return which part of a layer's KV cache one of so many devices keeps: no less than one head."""
    return 1 / min(ways, layers.kv_heads)
