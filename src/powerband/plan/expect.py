"""What a deployment that exists is expected to do on this machine, to stand beside what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerband import engines, plan
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
from powerband.plan.predict import Requests, Server
from powerband.plan.simulate import Limits
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Split, Steps

Expected = dict[str, dict[str, Interval]]
_NAMES = ("p50", "p90", "p95", "p99")


def beside(
    found: Measurement, deployment: Deployment[Any], *, model: Model, host: Host, base: Path | None
) -> Measurement:
    """Return the measurement with what was to be expected at each of its rates; unchanged where nothing is known."""
    on = deployed(deployment, model=model, host=host, known=calibrate.kept())
    if on is None or not on.times.coefficients.devices or all(level.rate_per_s is None for level in found.levels):
        return found
    if engines.get(deployment.engine).choice_of(deployment, model=model, host=host).drafted:
        return found  # how often drafts are accepted is nobody's guess
    requests = plan.draw(found.workload, model, base=base)
    levels = [_beside(level, on, requests) for level in found.levels]
    return found.model_copy(update={"levels": tuple(levels)})


def _beside(level: Level, on: Server, requests: Requests) -> Level:
    if level.rate_per_s is None:
        return level
    return level.model_copy(update={"expected": expected(on, requests, level.rate_per_s)})


def deployed(
    deployment: Deployment[Any],
    *,
    model: Model,
    host: Host,
    known: Sequence[Coefficients],
    scheme: str | None = None,
) -> Server | None:
    """Return the deployment as the simulation knows it, in the model's own scheme unless another is named.

    Drafts are left out of it: how often they are accepted is nobody's guess. None where nobody knows its numbers.
    """
    adapter = engines.get(deployment.engine)
    if adapter.scheduling is None or model.shape is None:
        return None
    device, _ = plan.this_machine(host)
    try:
        numbers = plan.scheme(scheme) if scheme else plan.scheme_of(model)
    except InputError:  # a number format that no scheme describes
        return None
    own = plan.fitted(plan.coefficients(known), deployment.engine, device, numbers.name)
    choice = adapter.choice_of(deployment, model=model, host=host)
    if choice.cores:
        device = device.part(choice.cores / len(host.cores))
    expert = choice.tensor * choice.data if choice.expert else 1
    split = Split(tensor=choice.tensor, pipeline=choice.pipeline, expert=expert, data=choice.data)
    steps = Steps(model.shape, numbers, split, kv_bytes=adapter.scheduling.kv_formats.get(choice.kv_format, 2.0))
    group = split.devices // split.data  # of devices that share a KV cache
    limits = Limits(
        sequences=choice.sequences * split.data,
        batched_tokens=choice.batched_tokens * split.data,
        kv_tokens=split.data * choice.kv_bytes / group / steps.kv_of(choice.context) * choice.context,
        request_s=own.request_s,
    )
    return Server(StepTimes(steps, device, own), limits)


def knee(on: Server, requests: Requests, slo: SLO) -> Interval:
    """Return the rate at which the SLO is expected to be just kept; nothing where it is kept at none."""
    found = predict.knee(on, requests, slo, flow=predict.fluid(on, requests.lengths, slo))
    rate, spread = found.rate_per_s if found else 0.0, on.times.coefficients.tpot
    return Interval(rate, rate / spread.high, rate / spread.low)


def expected(on: Server, requests: Requests, rate_per_s: float) -> Expected:
    """Play the requests at a rate, and once more with steps as slow and as quick as past errors allow."""
    spread, plays = on.times.coefficients, {}
    for name, prompt, token in (
        ("value", 1.0, 1.0),
        ("low", spread.ttft.low, spread.tpot.low),
        ("high", spread.ttft.high, spread.tpot.high),
    ):
        times = on.times.scaled(prompt=prompt, token=token)
        found = predict.outcome(Server(times, on.limits), requests, rate_per_s)
        plays[name] = {"ttft": sorted(found.ttft), "tpot": sorted(found.tpot)}
    return {
        metric: {
            name: Interval(
                **{part: statistics.quantile(values[metric], float(name[1:]) / 100) for part, values in plays.items()}
            )
            for name in _NAMES
        }
        for metric in ("ttft", "tpot")
        if all(values[metric] for values in plays.values())
    }
