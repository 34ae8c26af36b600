"""How long a step takes: a roofline of its work, with an engine's fitted coefficients."""

from __future__ import annotations

from powerband.core.coefficients import Coefficients
from powerband.core.device import Device
from powerband.plan.work import Batch, Steps, Work


class StepTimes:
    """The times of one deployment's steps."""

    def __init__(self, steps: Steps, device: Device, coefficients: Coefficients) -> None:
        self.steps, self.device, self.coefficients = steps, device, coefficients
        c, sparse = coefficients, steps.shape.experts > 0
        self._read = device.bandwidth * c.bandwidth * (c.experts_bandwidth if sparse else 1)
        self._read_kv = device.bandwidth * coefficients.kv_bandwidth
        number_format = steps.scheme.multiplies_in(device.tflops)
        reached = c.compute_in.get(number_format, c.compute) * (c.experts if sparse else 1)
        self._multiply = device.flops(number_format) * reached
        self._attend = device.flops("bf16") * coefficients.attention
        self._layer_s = c.layer_s + (c.experts_layer_s if sparse else 0)

    def __call__(self, batch: Batch) -> float:
        """Return the seconds of one step."""
        return self.seconds(self.steps(batch), prefill=batch.prefill)

    def seconds(self, work: Work, *, prefill: float = 0.0) -> float:
        """Return the seconds of a step with this work."""
        c = self.coefficients
        reading, computing = work.weight_bytes / self._read, work.flops / self._multiply
        weights: float = (reading**c.overlap + computing**c.overlap) ** (1 / c.overlap)
        attending = work.kv_bytes / self._read_kv + work.attention_flops / self._attend
        link = self.device.link
        sending = work.rounds * c.round_s + work.reduce_bytes / link / c.link + work.exchange_bytes / link / c.exchange
        fixed = c.step_s + work.layers * self._layer_s + work.sequences * c.sequence_s + prefill * c.token_s
        return weights + attending + sending + fixed
