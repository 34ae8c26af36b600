"""The duration of one engine step: a roofline of its work, with an engine's fitted coefficients."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

from powerband.core.coefficients import Coefficients
from powerband.core.device import Device
from powerband.plan.step_work import Batch, Steps, Work

_BF16_BYTES = 2.0


class Speculation(NamedTuple):
    """Speculative decoding: draft tokens per step, and the acceptance probability of each after accepted ones."""

    tokens: int = 0
    acceptance: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens that a sequence gains per step."""
        if self.acceptance >= 1:
            return 1.0 + self.tokens
        return (1 - self.acceptance ** (self.tokens + 1)) / (1 - self.acceptance)


NO_SPECULATION = Speculation()


class StepTimes:
    """Computes the duration of steps of one deployment."""

    def __init__(
        self,
        steps: Steps,
        device: Device,
        coefficients: Coefficients,
        *,
        speculation: Speculation = NO_SPECULATION,
        prefill: float = 1.0,
        decode: float = 1.0,
    ) -> None:
        self.steps, self.device, self.coefficients, self.speculation = steps, device, coefficients, speculation
        self._prefill, self._decode = prefill, decode  # factors for steps with prefill, and for decode-only steps
        c, sparse = coefficients, steps.shape.experts > 0
        self._weight_bandwidth = device.bandwidth * c.bandwidth * (c.experts_bandwidth if sparse else 1)
        # A CPU converts a narrow KV cache to bf16 before it multiplies: this saves memory but no time.
        conversion = min(1.0, steps.kv_bytes / _BF16_BYTES) if device.vendor == "cpu" else 1.0
        self._kv_bandwidth = device.bandwidth * c.kv_bandwidth * conversion
        dtype = steps.scheme.compute_dtype(device.tflops)
        reached = c.compute_by_format.get(dtype, c.compute) * (c.experts_compute if sparse else 1)
        if dtype == "bf16" and steps.scheme.expert_bits() < 8:
            reached *= c.weight_only_compute
        self._flops = device.flops(dtype) * reached
        self._attention_flops = device.flops("bf16") * c.attention
        self._batch_size_factors = sorted(c.batch_size_factors.items())
        self._layer_s = c.layer_s + (c.experts_layer_s if sparse else 0)

    def __call__(self, batch: Batch) -> float:
        """Return the duration of one step in seconds."""
        if self.speculation.tokens:
            batch = batch._replace(tokens_per_decode=1.0 + self.speculation.tokens)
        if not batch.prefill_tokens:
            return self._decode_s(batch)
        if batch.decodes and self.coefficients.separate_prefill_decode:
            prefill, decode = batch._replace(decodes=0.0), batch._replace(prefill_tokens=0.0, finished_prompts=0.0)
            return self._prefill_s(prefill) + self._decode_s(decode)
        return self._prefill_s(batch)

    def _decode_s(self, batch: Batch) -> float:
        seconds = self.seconds(self.steps(batch)) * self._decode
        return seconds * _interpolate(self._batch_size_factors, batch.decodes) if self._batch_size_factors else seconds

    def _prefill_s(self, batch: Batch) -> float:
        return self.seconds(self.steps(batch), finished_prompts=batch.finished_prompts) * self._prefill

    @property
    def factors(self) -> tuple[float, float]:
        """Return the factors on steps with prefill and on decode-only steps."""
        return self._prefill, self._decode

    def scaled(self, *, prefill: float, decode: float) -> StepTimes:
        """Return the same step times, multiplied by a factor for steps with prefill and one for decode-only steps."""
        factors = {"prefill": self._prefill * prefill, "decode": self._decode * decode}
        return StepTimes(self.steps, self.device, self.coefficients, speculation=self.speculation, **factors)

    def seconds(self, work: Work, *, finished_prompts: float = 0.0) -> float:
        """Return the duration of a step with this work."""
        c = self.coefficients
        reading, computing = work.weight_bytes / self._weight_bandwidth, work.flops / self._flops
        weights: float = (reading**c.overlap + computing**c.overlap) ** (1 / c.overlap)
        attention = work.kv_bytes / self._kv_bandwidth + work.attention_flops / self._attention_flops
        link = self.device.link
        communication = (
            work.collectives * c.collective_s
            + work.all_reduce_bytes / link / c.all_reduce_bandwidth
            + work.all_to_all_bytes / link / c.all_to_all_bandwidth
        )
        fixed = c.step_s + work.layers * self._layer_s + work.sequences * c.sequence_s + finished_prompts * c.prompt_s
        return (weights + attention + communication + fixed) * c.mixed_load_factor


def _interpolate(table: list[tuple[int, float]], at: float) -> float:
    """Return the table's value at a point, interpolated linearly and constant outside."""
    place = bisect.bisect_right(table, (at, math.inf))
    if place == 0 or place == len(table):
        return table[max(0, place - 1)][1]
    (left, low), (right, high) = table[place - 1], table[place]
    return low + (high - low) * (at - left) / (right - left)
