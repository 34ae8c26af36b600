"""The stage `plan`: rank the ways to serve a model by predicted cost, without running anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from powerband import catalog, engines, quantizers
from powerband._callable import make_callable
from powerband.core import statistics
from powerband.core.coefficients import Coefficients
from powerband.core.evidence import ExpectedQuality
from powerband.core.model import Model
from powerband.core.plan import Candidate, OfferedDevices, Plan, Rejection
from powerband.core.quality import QualityFloor
from powerband.core.scheme import Scheme
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.support import Fact
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import arrivals, prompts, tokens
from powerband.plan import predict, residual_model
from powerband.plan.lookup import coefficients as coefficients
from powerband.plan.lookup import coefficients_for as coefficients_for
from powerband.plan.lookup import device as device
from powerband.plan.lookup import this_machine as this_machine
from powerband.plan.options import Lengths, Offer, Option, options
from powerband.plan.predict import FluidEstimate, Requests, Server
from powerband.plan.quality import Prior
from powerband.plan.step_time import NO_SPECULATION, Speculation
from powerband.runtime import model_files
from powerband.store.schemes import all_schemes, published_scheme

_SAMPLED_REQUESTS = 1500
_SIMULATED = 16  # options to simulate: those with the best fluid estimates
_SIMULATED_PER_DEVICE = 1  # at least
_REFINED = 3  # of the best, also simulated with the engine's default batch if that is larger
_CONTEXT_STEP = 512


@dataclass(frozen=True)
class PlanSpec:
    """What to plan for."""

    model: Model
    workload: Workload
    slo: SLO
    offers: tuple[Offer, ...]
    engine: str | None = None
    schemes: tuple[str, ...] = ()
    floor: QualityFloor | None = None  # options that the evidence says will fail it are rejected
    load_per_s: float | None = None
    speculation: Speculation = NO_SPECULATION  # planned in addition to options without speculation
    base: Path | None = None  # of relative paths in the workload
    calibrated: tuple[Coefficients, ...] = ()  # of this machine; they take precedence over the catalogue's


@dataclass(frozen=True)
class FittingOption:
    """An option that fits in memory, with its simulated replica and fluid estimate."""

    option: Option
    server: Server
    estimate: FluidEstimate
    quality: ExpectedQuality


def plan(spec: PlanSpec) -> Plan:
    """Rank every way to serve the model on the offered devices."""
    if spec.model.shape is None:
        raise InputError(
            f"cannot read the model's architecture from {spec.model.source}", hint="give its config.json or a GGUF file"
        )
    requests = sample_requests(spec.workload, spec.model, base=spec.base)
    known = coefficients(spec.calibrated)
    fitting: list[FittingOption] = []
    rejections: list[Rejection] = []
    schemes = eligible_schemes(spec.model, wanted=spec.schemes)
    lengths = requests.lengths
    prior = Prior(spec.model, spec.floor, longest_tokens=lengths.max_tokens, output_tokens=lengths.output)
    quality_of = cache(prior.expected)
    for offer in spec.offers:
        for found in options(spec.model, offer, requests.lengths, schemes, wanted_engine=spec.engine):
            if isinstance(found, Rejection):
                rejections.append(found)
                continue
            quality = quality_of(found.engine, found.scheme.name or "", found.kv_format)
            if quality.outlook == "unlikely":
                rejections.append(_likely_below_the_floor(found, quality))
                continue
            fitted = coefficients_for(known, found.engine, offer.device, found.scheme.name)
            server = predict.server_for(found, fitted)
            estimate = predict.fluid_estimate(server, requests.lengths, spec.slo)
            fitting.append(FittingOption(found, server, estimate, quality))
    ranked: list[tuple[Candidate, FittingOption]] = []
    shares: dict[str, float] = {}
    for one in _to_simulate(fitting, spec):
        if (candidate := _simulated(one, requests, spec, shares)) is None:
            rejections.append(_too_slow(_corrected(one, requests.lengths, spec.slo), requests, spec.slo))
        else:
            ranked.append((candidate, one))
    ranked.sort(key=lambda pair: _rank(pair[0]))
    candidates = [candidate for candidate, _ in ranked]
    for number, (candidate, one) in enumerate(ranked[:_REFINED]):
        if larger := one.option.with_default_batch():
            again = _simulated(_with(larger, one), requests, spec, shares)
            candidates[number] = min(filter(None, (candidate, again)), key=_rank)
    candidates.sort(key=_rank)
    return Plan(
        model=spec.model.source,
        workload=spec.workload,
        slo=spec.slo,
        floor=spec.floor,
        load_per_s=spec.load_per_s,
        offers=tuple(_offered(offer) for offer in spec.offers),
        candidates=tuple(candidates),
        rejections=tuple(rejections),
        facts=_facts(spec.model, requests),
    )


def _rank(one: Candidate) -> tuple[bool, float]:
    return not one.documented, one.usd_per_1m_tokens.value


def _simulated(
    uncorrected: FittingOption, requests: Requests, spec: PlanSpec, shares: dict[str, float]
) -> Candidate | None:
    """Return the candidate of an option; None if it misses the SLO at every rate.

    `shares` has the last max rate of each engine, as a share of the fluid estimate: most deployments are near it.
    """
    one = _corrected(uncorrected, requests.lengths, spec.slo)
    share = shares.get(one.option.engine, 0.0)
    predicted = predict.max_rate(one.server, requests, spec.slo, estimate=one.estimate, start_share=share)
    if predicted:
        shares[one.option.engine] = predicted.rate_per_s / one.estimate.rate_per_s
    return _candidate(one, predicted, requests, spec) if predicted else None


def sample_requests(workload: Workload, model: Model, *, base: Path | None = None) -> Requests:
    """Return the requests that `bench` would send, at a mean rate of one per second."""
    open_loop = workload.at_rate(1.0)
    vocabulary = tokens.vocabulary(model_files.location(model.source))
    turns = workload.turns.count if workload.turns else 1
    traffic = prompts.prepare(open_loop, math.ceil(_SAMPLED_REQUESTS / turns), vocabulary=vocabulary, base=base)
    inputs, outputs = ([one[part] for one in traffic.requests()] for part in (1, 2))
    totals = [a + b for a, b in zip(inputs, outputs, strict=True)]
    longest, limit = max(totals), model.context_tokens
    if limit and longest > limit:
        share = sum(one > limit for one in totals) / len(totals)
        raise InputError(
            f"{share:.0%} of the requests are longer than the model's context of {limit} tokens; "
            f"the longest has {longest} tokens with its answer",
            hint="use a model with a longer context, or limit lengths and turns in the workload",
        )
    with_margin = math.ceil(1.25 * longest / _CONTEXT_STEP) * _CONTEXT_STEP
    lengths = Lengths(
        prompt=sum(inputs) / len(inputs),
        output=sum(outputs) / len(outputs),
        max_tokens=min(with_margin, limit or with_margin),
        cached_share=traffic.prefix_share,
        adapters=len(workload.adapters),
        adapter_rank=max((one.rank for one in workload.adapters), default=0),
    )
    # later turns arrive after answers that the plan does not know: independent arrivals stand for them
    due_s = traffic.due_s if turns == 1 else arrivals.times_s(open_loop.model_copy(update={"turns": None}), len(inputs))
    return Requests(due_s, inputs, outputs, lengths)


def eligible_schemes(model: Model, *, wanted: Sequence[str] = ()) -> list[Scheme]:
    """Return the schemes for a model: the published one, and those that `quantize` can make from it.

    Those that `quantize` cannot make, and those known to degrade answers, are included only if `wanted` names them.
    """
    for name in wanted:
        catalog.text("scheme", name)  # raises if the name is unknown
    published, shape = published_scheme(model), model.shape
    assert shape is not None
    found = [published]
    if model.format != "gguf" or published.name == "f16":
        size = published.weight_bytes(shape)
        # Only smaller schemes are worth making; one in the other file format may have about the same size.
        limits = {format: (0.99 if format == published.format else 1.01) * size for format in ("safetensors", "gguf")}
        found += [
            one for one in all_schemes() if one.weight_bytes(shape) < limits[one.format] and one.name != published.name
        ]
    made = quantizers.schemes()
    return [
        one
        for one in found
        if (one.name in wanted if wanted else one is published or (one.name in made and not one.risky))
    ]


def _offered(offer: Offer) -> OfferedDevices:
    return OfferedDevices(
        device=offer.device.name or "",
        description=offer.device.description or "",
        requested_as=offer.requested_as,
        count=offer.count,
        usd_per_h=offer.usd_per_h,
    )


def _to_simulate(fitting: list[FittingOption], spec: PlanSpec) -> list[FittingOption]:
    """Return the options worth a simulation: the cheapest by the fluid estimate, and at least one of every device."""

    def usd_per_request(one: FittingOption) -> float:
        return one.option.offer.usd_per_h * one.option.split.devices / max(one.estimate.rate_per_s, 1e-9)

    chosen: list[FittingOption] = []
    per_device: dict[str, int] = {}
    for one in sorted(fitting, key=lambda one: (not one.option.documented, usd_per_request(one))):
        name = one.option.offer.device.name or ""
        if len(chosen) < _SIMULATED or per_device.get(name, 0) < _SIMULATED_PER_DEVICE:
            chosen.append(one)
            per_device[name] = per_device.get(name, 0) + 1
            if spec.speculation.tokens:
                chosen.append(_with(one.option.with_speculation(spec.speculation), one))
    return chosen


def _with(option: Option, one: FittingOption) -> FittingOption:
    """Return the same fit with an option's other settings; `_corrected` computes its estimate anew."""
    return replace(one, option=option, server=predict.server_for(option, one.server.times.coefficients))


def _corrected(one: FittingOption, lengths: Lengths, slo: SLO) -> FittingOption:
    """Apply the residual model at the batch size of the fluid estimate, and estimate again."""
    concurrency = max(1.0, one.estimate.rate_per_s * one.estimate.answer_s)
    found = predict.closed_loop(one.server.times, concurrency, lengths)
    server = Server(residual_model.corrected(one.option.engine, one.server.times, found), one.server.limits)
    return replace(one, server=server, estimate=predict.fluid_estimate(server, lengths, slo))


def _candidate(one: FittingOption, predicted: predict.Prediction, requests: Requests, spec: PlanSpec) -> Candidate:
    option, fitted, estimate = one.option, one.server.times.coefficients, one.estimate
    rate, lengths = predicted.rate_per_s, requests.lengths
    usd_per_h = option.offer.usd_per_h * option.split.devices
    if fitted in spec.calibrated:
        goodput = predict.max_rate_interval(one.server, requests, spec.slo, rate)
    else:
        goodput = Interval(rate, rate / fitted.tpot.high, rate / fitted.tpot.low)
    usd_per_request = usd_per_h / 3600 / rate
    million_tokens = (lengths.prompt + lengths.output) / 1e6
    fleet = None if spec.load_per_s else option.offer.count // option.split.devices

    def cost(at: float) -> float:
        return usd_per_h / 3600 / at / million_tokens

    names = sorted({"p50", *(f"p{share * 100:g}" for _, share, _ in spec.slo.bounds())})
    return Candidate(
        device=option.offer.device.name or "",
        devices=option.split.devices,
        engine=option.engine,
        scheme=option.scheme.name or "",
        kv_format=option.kv_format,
        split=option.layout,
        memory=option.memory,
        sequences=option.settings.sequences,
        goodput_per_s=goodput,
        ttft_s=predict.percentiles(predicted.outcome.ttft, fitted.ttft, names),
        tpot_s=predict.percentiles(predicted.outcome.tpot, fitted.tpot, names),
        replicas=math.ceil(spec.load_per_s / rate) if spec.load_per_s else 1,
        fleet_replicas=fleet,
        fleet_per_s=Interval(fleet * rate, fleet * goodput.low, fleet * goodput.high) if fleet else None,
        fleet_usd_per_h=fleet * usd_per_h if fleet else None,
        usd_per_h=usd_per_h,
        usd_per_1m_input=usd_per_request * estimate.prefill_share / lengths.prompt * 1e6,
        usd_per_1m_output=usd_per_request * (1 - estimate.prefill_share) / lengths.output * 1e6,
        usd_per_1m_tokens=Interval(cost(rate), cost(goodput.high), cost(goodput.low)),
        limited_by=estimate.limited_by,
        basis=fitted.source or fitted.name or "",
        price_source=option.offer.price_source,
        price_estimated=option.offer.price_estimated,
        documented=option.documented,
        support=_supports(option),
        quality=one.quality,
        deployment=option.deployment(),
    )


def _supports(option: Option) -> tuple[str, ...]:
    """Return what is documented of the weights and the KV format, and whether anybody has run the engine."""
    documented = (_support(what, fact) for what, fact in zip(("weights", "KV cache"), option.support, strict=True))
    return tuple(filter(None, (*documented, engines.get(option.engine).never_run())))


def _support(what: str, fact: Fact | None) -> str:
    if fact is None:
        return f"{what}: not documented"
    return f"{what}: {fact.level}{f', {fact.note}' if fact.note else ''} ({fact.source.url}, {fact.source.as_of})"


def _likely_below_the_floor(option: Option, quality: ExpectedQuality) -> Rejection:
    """Return the rejection of an option whose published quality is below the floor."""
    figures = "; ".join(one.text for one in quality.figures)
    return Rejection(
        device=option.offer.device.name or "",
        engine=option.engine,
        scheme=option.scheme.name or "",
        what=f"{option.kv_format} KV",
        reason=f"it will likely fail the quality floor: {figures} ({quality.likeness})",
        remedy="a looser --quality, or evaluate it: your model may do better",
    )


def _too_slow(one: FittingOption, requests: Requests, slo: SLO) -> Rejection:
    """Return the rejection of an option that misses the SLO at every rate."""
    option, unloaded = one.option, predict.outcome_at(one.server, requests, one.estimate.rate_per_s / 100)
    missed = []
    for metric, share, limit in slo.bounds():
        values = sorted(getattr(unloaded, "tpot" if metric == "itl" else metric))
        value = statistics.quantile(values, share) if values else math.inf
        if value > limit:
            name = f"{metric.upper()} p{share * 100:g}"
            missed.append(f"{name} is {value * 1e3:.0f} ms at concurrency 1 (limit {limit * 1e3:.0f} ms)")
    return Rejection(
        device=option.offer.device.name or "",
        engine=option.engine,
        scheme=option.scheme.name or "",
        what=f"{option.kv_format} KV on {option.layout}",
        reason="; ".join(missed) or "it meets the SLO at no request rate",
        remedy="more devices per replica, a smaller scheme, or a looser SLO",
    )


def _facts(model: Model, requests: Requests) -> dict[str, float]:
    shape, lengths = model.shape, requests.lengths
    assert shape is not None
    return {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "kv_numbers_per_token": shape.kv_elements(),
        "prompt_tokens": lengths.prompt,
        "output_tokens": lengths.output,
        "longest_tokens": lengths.max_tokens,
        "known_prompt_share": lengths.cached_share,
    }


make_callable(__name__)
