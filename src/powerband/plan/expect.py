"""The expected latencies and rates of an existing deployment on this machine, to compare with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import powerband.plan as plan
from powerband import engines
from powerband.core import statistics
from powerband.core.coefficients import Coefficients
from powerband.core.deployment import Deployment
from powerband.core.host import Host
from powerband.core.measurement import Level, Measurement
from powerband.core.model import Model
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.errors import InputError
from powerband.plan import calibrate, predict
from powerband.plan.options import of_weights, on_device
from powerband.plan.predict import Requests, Server
from powerband.plan.simulate import Limits
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Split, Steps
from powerband.store import schemes
from powerband.store.schemes import published_scheme

Expected = dict[str, dict[str, Interval]]
# Step time on a CPU that emulates 16-bit floats over that with float32, by the weights' arithmetic (ADR 10).
_EMULATION_16_BIT, _EMULATION_INT8 = 2.3, 1.25
_PERCENTILES = ("p50", "p90", "p95", "p99")


def with_expected(
    measured: Measurement, deployment: Deployment[Any], *, model: Model, host: Host, base: Path | None
) -> Measurement:
    """Return the measurement with the expected latencies at each of its rates; unchanged without coefficients."""
    server = server_for(deployment, model=model, host=host, known=calibrate.saved())
    has_rates = any(level.rate_per_s is not None for level in measured.levels)
    if server is None or not server.times.coefficients.devices or not has_rates:
        return measured
    if engines.get(deployment.engine).settings_of(deployment, model=model, host=host).drafted:
        return measured  # the acceptance rate of draft tokens is unknown
    requests = plan.sample_requests(measured.workload, model, base=base)
    levels = [_with_expected(level, server, requests) for level in measured.levels]
    return measured.model_copy(update={"levels": tuple(levels)})


def _with_expected(level: Level, server: Server, requests: Requests) -> Level:
    if level.rate_per_s is None:
        return level
    return level.model_copy(update={"expected": expected(server, requests, level.rate_per_s)})


def server_for(
    deployment: Deployment[Any],
    *,
    model: Model,
    host: Host,
    known: Sequence[Coefficients],
    scheme: str | None = None,
) -> Server | None:
    """Return the simulated replica of a deployment; None if its engine or weights cannot be simulated.

    Without `scheme` the weights are as published. Speculative decoding is ignored: its acceptance rate is unknown.
    """
    adapter = engines.get(deployment.engine)
    if adapter.scheduling is None or model.shape is None:
        return None
    try:
        device, _ = plan.this_machine(host)
        weights = schemes.scheme(scheme) if scheme else published_scheme(model)
    except InputError:  # the catalogue does not know the GPU, or no scheme of it describes these weights
        return None
    coefficients = plan.coefficients_for(plan.coefficients(known), deployment.engine, device, weights.name)
    settings = adapter.settings_of(deployment, model=model, host=host)
    weights = on_device(weights, of_weights(deployment.engine, weights, device, model))
    if settings.cores:
        device = device.scaled(settings.cores / len(host.cores))
    expert = settings.tensor * settings.data if settings.expert else 1
    split = Split(tensor=settings.tensor, pipeline=settings.pipeline, expert=expert, data=settings.data)
    steps = Steps(model.shape, weights, split, kv_bytes=adapter.scheduling.kv_formats.get(settings.kv_format, 2.0))
    sharing = split.devices // split.data  # devices that share one KV cache
    limits = Limits(
        sequences=settings.sequences * split.data,
        batched_tokens=settings.batched_tokens * split.data,
        kv_tokens=split.data * settings.kv_bytes / sharing / steps.kv_of(settings.context) * settings.context,
        request_s=coefficients.request_s,
    )
    times = StepTimes(steps, device, coefficients)
    if settings.emulates_16_bit and not coefficients.devices:  # a calibration has measured it
        slower = _EMULATION_16_BIT if weights.compute_dtype(device.tflops) == "bf16" else _EMULATION_INT8
        times = times.scaled(prefill=slower, decode=slower)
    return Server(times, limits)


def max_rate(server: Server, requests: Requests, slo: SLO) -> Interval:
    """Return the expected highest rate that meets the SLO; 0 if no rate does."""
    found = predict.max_rate(server, requests, slo, estimate=predict.fluid_estimate(server, requests.lengths, slo))
    rate, spread = found.rate_per_s if found else 0.0, server.times.coefficients.tpot
    return Interval(rate, rate / spread.high, rate / spread.low)


def expected(server: Server, requests: Requests, rate_per_s: float) -> Expected:
    """Simulate the requests at a rate, with expected step times and with those at both ends of the spread."""
    coefficients, simulated = server.times.coefficients, {}
    for bound, prefill, decode in (
        ("value", 1.0, 1.0),
        ("low", coefficients.ttft.low, coefficients.tpot.low),
        ("high", coefficients.ttft.high, coefficients.tpot.high),
    ):
        times = server.times.scaled(prefill=prefill, decode=decode)
        found = predict.outcome_at(Server(times, server.limits), requests, rate_per_s)
        simulated[bound] = {"ttft": sorted(found.ttft), "tpot": sorted(found.tpot)}
    return {
        metric: {
            name: Interval(
                **{
                    bound: statistics.quantile(values[metric], share := float(name[1:]) / 100)
                    * predict.tail(metric, share, coefficients)
                    for bound, values in simulated.items()
                }
            )
            for name in _PERCENTILES
        }
        for metric in ("ttft", "tpot")
        if all(values[metric] for values in simulated.values())
    }
