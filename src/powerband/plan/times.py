"""How long a step takes: a roofline of its work, with an engine's fitted coefficients."""

from __future__ import annotations

from powerband.core.coefficients import Coefficients
from powerband.core.device import Device
from powerband.plan.work import Batch, Steps, Work


class StepTimes:
    """The times of one deployment's steps."""

    def __init__(
        self, steps: Steps, device: Device, coefficients: Coefficients, *, prompt: float = 1.0, token: float = 1.0
    ) -> None:
        self.steps, self.device, self.coefficients = steps, device, coefficients
        self._prompt, self._token = prompt, token  # factors for steps that read prompts, and for those that only write
        c, sparse = coefficients, steps.shape.experts > 0
        self._read = device.bandwidth * c.bandwidth * (c.experts_bandwidth if sparse else 1)
        self._read_kv = device.bandwidth * coefficients.kv_bandwidth
        number_format = steps.scheme.multiplies_in(device.tflops)
        reached = c.compute_in.get(number_format, c.compute) * (c.experts if sparse else 1)
        if number_format == "bf16" and steps.scheme.expert_bits() < 8:
            reached *= c.unpacking
        self._multiply = device.flops(number_format) * reached
        self._attend = device.flops("bf16") * coefficients.attention
        self._layer_s = c.layer_s + (c.experts_layer_s if sparse else 0)

    def __call__(self, batch: Batch) -> float:
        """Return the seconds of one step."""
        return self.seconds(self.steps(batch), firsts=batch.firsts) * (self._prompt if batch.prefill else self._token)

    def scaled(self, *, prompt: float, token: float) -> StepTimes:
        """Return the same, slower or quicker."""
        factors = {"prompt": self._prompt * prompt, "token": self._token * token}
        return StepTimes(self.steps, self.device, self.coefficients, **factors)

    def seconds(self, work: Work, *, firsts: float = 0.0) -> float:
        """Return the seconds of a step with this work."""
        c = self.coefficients
        reading, computing = work.weight_bytes / self._read, work.flops / self._multiply
        weights: float = (reading**c.overlap + computing**c.overlap) ** (1 / c.overlap)
        attending = work.kv_bytes / self._read_kv + work.attention_flops / self._attend
        link = self.device.link
        sending = work.rounds * c.round_s + work.reduce_bytes / link / c.link + work.exchange_bytes / link / c.exchange
        fixed = c.step_s + work.layers * self._layer_s + work.sequences * c.sequence_s + firsts * c.prompt_s
        return weights + attending + sending + fixed
