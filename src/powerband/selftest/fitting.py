"""Fit the planner's coefficients to probes of a running engine, and compute the error of a prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from powerband.core.coefficients import Coefficients
from powerband.core.device import Device
from powerband.plan import calibrate
from powerband.plan.probe import ConcurrentProbe, ProbeResult
from powerband.plan.simulate import Limits, simulate
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Steps

# Fitted to many devices and models; a replica on one device cannot measure them.
_KEPT = ("collective_s", "all_reduce_bandwidth", "all_to_all_bandwidth", "experts_compute", "experts_bandwidth",
         "experts_layer_s")  # fmt: skip
_KV_TOKENS = 1e12  # the probes fit into every KV cache


def fit(
    steps: Steps,
    device: Device,
    known: Coefficients,
    results: Sequence[ProbeResult],
    loops: Sequence[ConcurrentProbe],
    *,
    batched_tokens: int,
) -> Coefficients:
    """Return coefficients of this machine; what one device cannot measure is taken from the known ones."""
    request_s = fixed_latency_s(results)
    in_engine = [replace(one, ttft_s=max(1e-4, one.ttft_s - request_s)) for one in results]
    source = f"{len(results)} probes by powerband selftest"
    name = f"selftest-{known.engine}-{device.name}"
    found = calibrate.fit(steps, device, known.engine, in_engine, name=name, source=source)
    found = found.model_copy(update={one: getattr(known, one) for one in _KEPT} | {"request_s": request_s})
    times = StepTimes(steps, device, found)
    ratios = [_factor(one, times, batched_tokens) for one in loops]
    return found.model_copy(update={"mixed_load_factor": round(statistics.median(ratios), 3)} if ratios else {})


def fixed_latency_s(results: Sequence[ProbeResult]) -> float:
    """Return the part of the TTFT that does not depend on the prompt and is not a step of the engine."""
    alone = [one for one in results if one.probe.concurrency == 1]
    lengths, latencies = [one.probe.prompt for one in alone], [one.ttft_s for one in alone]
    if len(set(lengths)) < 2:
        return 0.0
    intercept_s = statistics.linear_regression(lengths, latencies).intercept
    return max(0.0, intercept_s - statistics.median(one.step_s for one in alone))


def predicted_s(times: StepTimes, one: ConcurrentProbe, batched_tokens: int) -> float:
    """Return the predicted duration of a closed loop."""
    limits = Limits(
        sequences=one.concurrency,
        batched_tokens=batched_tokens,
        kv_tokens=_KV_TOKENS,
        request_s=times.coefficients.request_s,
    )
    found = simulate([0.0] * one.concurrency, one.prompts, one.outputs, times, limits, closed=True)
    return max(due + e2e for due, e2e in zip(found.due, found.e2e, strict=True))


def error(times: StepTimes, loops: Sequence[ConcurrentProbe], batched_tokens: int) -> float:
    """Return the median relative error of the predicted durations of closed loops."""
    return statistics.median(abs(predicted_s(times, one, batched_tokens) / one.seconds - 1) for one in loops)


def inside_interval(times: StepTimes, loops: Sequence[ConcurrentProbe], batched_tokens: int) -> float:
    """Return the share of closed loops whose duration is inside the prediction's interval."""
    spread = times.coefficients.tpot
    ratios = [one.seconds / predicted_s(times, one, batched_tokens) for one in loops]
    return sum(spread.low <= ratio <= spread.high for ratio in ratios) / len(ratios)


def _factor(one: ConcurrentProbe, times: StepTimes, batched_tokens: int) -> float:
    """Return the factor on step times with which the prediction is the measured duration."""
    steps_only = times.coefficients.model_copy(update={"request_s": 0.0})
    waiting_s = times.coefficients.request_s * len(one.prompts) / one.concurrency  # of each user
    predicted = predicted_s(StepTimes(times.steps, times.device, steps_only), one, batched_tokens)
    return max(0.5, (one.seconds - waiting_s) / predicted)
