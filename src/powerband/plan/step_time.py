"""How long a step takes: a roofline of its work, with an engine's fitted coefficients."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

from powerband.core.coefficients import Coefficients
from powerband.core.device import Device
from powerband.plan.step_work import Batch, Steps, Work

_WIDE = 2.0  # bytes of a number that every device multiplies


class Drafting(NamedTuple):
    """So many tokens are guessed for each step, and each is accepted with this chance if those before it were."""

    tokens: int = 0
    acceptance: float = 0.0

    @property
    def per_step(self) -> float:
        """Return the tokens that a step gains on average."""
        if self.acceptance >= 1:
            return 1.0 + self.tokens
        return (1 - self.acceptance ** (self.tokens + 1)) / (1 - self.acceptance)


NO_DRAFTS = Drafting()


class StepTimes:
    """The times of one deployment's steps."""

    def __init__(
        self,
        steps: Steps,
        device: Device,
        coefficients: Coefficients,
        *,
        drafting: Drafting = NO_DRAFTS,
        prompt: float = 1.0,
        token: float = 1.0,
    ) -> None:
        self.steps, self.device, self.coefficients, self.drafting = steps, device, coefficients, drafting
        self._prompt, self._token = prompt, token  # factors for steps that read prompts, and for those that only write
        c, sparse = coefficients, steps.shape.experts > 0
        self._read_weights = device.bandwidth * c.bandwidth * (c.experts_bandwidth if sparse else 1)
        # A CPU widens narrow keys and values before it multiplies: they save room there, and no time.
        widening = min(1.0, steps.kv_bytes / _WIDE) if device.vendor == "cpu" else 1.0
        self._read_kv = device.bandwidth * coefficients.kv_bandwidth * widening
        number_format = steps.scheme.multiplies_in(device.tflops)
        reached = c.compute_in.get(number_format, c.compute) * (c.experts if sparse else 1)
        if number_format == "bf16" and steps.scheme.expert_bits() < 8:
            reached *= c.unpacking
        self._multiply = device.flops(number_format) * reached
        self._attend = device.flops("bf16") * coefficients.attention
        self._batches = sorted(c.batches.items())
        self._layer_s = c.layer_s + (c.experts_layer_s if sparse else 0)

    def __call__(self, batch: Batch) -> float:
        """Return the seconds of one step."""
        if self.drafting.tokens:
            batch = batch._replace(width=1.0 + self.drafting.tokens)
        if not batch.prefill:
            return self._write(batch)
        if batch.decodes and self.coefficients.apart:
            return self._read_prompts(batch._replace(decodes=0.0)) + self._write(
                batch._replace(prefill=0.0, firsts=0.0)
            )
        return self._read_prompts(batch)

    def _write(self, batch: Batch) -> float:
        seconds = self.seconds(self.steps(batch)) * self._token
        return seconds * _between(self._batches, batch.decodes) if self._batches else seconds

    def _read_prompts(self, batch: Batch) -> float:
        return self.seconds(self.steps(batch), firsts=batch.firsts) * self._prompt

    def scaled(self, *, prompt: float, token: float) -> StepTimes:
        """Return the same, slower or quicker."""
        factors = {"prompt": self._prompt * prompt, "token": self._token * token}
        return StepTimes(self.steps, self.device, self.coefficients, drafting=self.drafting, **factors)

    def seconds(self, work: Work, *, firsts: float = 0.0) -> float:
        """Return the seconds of a step with this work."""
        c = self.coefficients
        reading, computing = work.weight_bytes / self._read_weights, work.flops / self._multiply
        weights: float = (reading**c.overlap + computing**c.overlap) ** (1 / c.overlap)
        attending = work.kv_bytes / self._read_kv + work.attention_flops / self._attend
        link = self.device.link
        sending = work.rounds * c.round_s + work.reduce_bytes / link / c.link + work.exchange_bytes / link / c.exchange
        fixed = c.step_s + work.layers * self._layer_s + work.sequences * c.sequence_s + firsts * c.prompt_s
        return (weights + attending + sending + fixed) * c.traffic


def _between(table: list[tuple[int, float]], at: float) -> float:
    """Return what a table says, on a line between its entries."""
    place = bisect.bisect_right(table, (at, math.inf))
    if place == 0 or place == len(table):
        return table[max(0, place - 1)][1]
    (left, low), (right, high) = table[place - 1], table[place]
    return low + (high - low) * (at - left) / (right - left)
