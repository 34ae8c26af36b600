"""The stage `plan`: what fits, how fast, what it costs, before an accelerator is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from powerband import catalog, engines
from powerband.core import statistics
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.device import Device
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.plan import Candidate, Plan, Rejection
from powerband.core.scheme import Scheme
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import prompts, tokens
from powerband.plan import local_device, predict, residual_model
from powerband.plan.options import Lengths, Offer, Option, options
from powerband.plan.predict import Fluid, Requests, Server
from powerband.plan.step_time import NO_DRAFTS, Drafting
from powerband.store import documents

_DRAWN = 1500  # requests that may be played
_SIMULATED = 16  # options that are played: those that the fluid estimate puts first
_PER_DEVICE = 1
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
    load_per_s: float | None = None
    drafting: Drafting = NO_DRAFTS  # also tried, where it is given
    base: Path | None = None  # of the workload's own paths
    calibrated: tuple[Coefficients, ...] = ()  # of this machine; they come before the catalogue's


@dataclass(frozen=True)
class Fitting:
    """An option that fits, as a server, and what a steady flow would get of it."""

    option: Option
    on: Server
    flow: Fluid


def plan(order: PlanSpec) -> Plan:
    """Rank every way to serve the model on the devices that are offered."""
    if order.model.shape is None:
        raise InputError(f"{order.model.source} does not tell its shape", hint="give its config.json or a GGUF file")
    requests = draw(order.workload, order.model, base=order.base)
    known = coefficients(order.calibrated)
    fitting: list[Fitting] = []
    rejections: list[Rejection] = []
    schemes = eligible(order.model, wanted=order.schemes)
    for offer in order.offers:
        for found in options(order.model, offer, requests.lengths, schemes, wanted_engine=order.engine):
            if isinstance(found, Rejection):
                rejections.append(found)
                continue
            own = fitted(known, found.engine, offer.device, found.scheme.name)
            on = predict.server(found, own)
            fitting.append(Fitting(found, on, predict.fluid(on, requests.lengths, order.slo)))
    candidates = []
    for rough in _promising(fitting, order):
        one = _corrected(rough, requests.lengths, order.slo)
        predicted = predict.knee(one.on, requests, order.slo, flow=one.flow)
        if predicted is None:
            rejections.append(_too_slow(one, requests, order.slo))
        else:
            candidates.append(_candidate(one, predicted, requests, order))
    candidates.sort(key=lambda one: one.usd_per_1m_tokens.value)
    return Plan(
        model=order.model.source,
        workload=order.workload,
        slo=order.slo,
        load_per_s=order.load_per_s,
        candidates=tuple(candidates),
        rejections=tuple(rejections),
        facts=_facts(order.model, requests),
    )


def draw(workload: Workload, model: Model, *, base: Path | None = None) -> Requests:
    """Draw the requests that `bench` would send, one a second on average."""
    open_loop = workload.at_rate(1.0)
    traffic = prompts.prepare(open_loop, _DRAWN, vocabulary=tokens.vocabulary(model.source), base=base)
    inputs, outputs = list(traffic.prompt_tokens), list(traffic.output_tokens)[:: traffic.turns]
    longest = max(a + b for a, b in zip(inputs, outputs, strict=True))
    room = math.ceil(1.25 * longest / _CONTEXT_STEP) * _CONTEXT_STEP
    lengths = Lengths(
        prompt=sum(inputs) / len(inputs),
        output=sum(outputs) / len(outputs),
        longest=min(room, model.context_tokens or room),
        known_share=traffic.prefix_share,
    )
    return Requests(traffic.due_s, inputs, outputs, lengths)


def scheme_of(model: Model) -> Scheme:
    """Return the scheme in which a model is published."""
    for one in all_schemes():
        if model.numbers in one.published_as and one.format == (model.format or "safetensors"):
            return one
    raise InputError(
        f"{model.source} has numbers in '{model.numbers}', which no scheme of the catalogue describes",
        hint=f"schemes: {', '.join(catalog.names('scheme'))}",
    )


def eligible(model: Model, *, wanted: Sequence[str] = ()) -> list[Scheme]:
    """Return the schemes that a model can be had in: its own, and what `quantize` can make of it.

    Schemes that are known to spoil answers are offered to those who name them.
    """
    for name in wanted:
        catalog.text("scheme", name)  # refuses an unknown name
    own, shape = scheme_of(model), model.shape
    assert shape is not None
    found = [own]
    if model.format != "gguf" or own.name == "f16":
        size = own.weight_bytes(shape)
        most = {one: (0.99 if one == own.format else 1.01) * size for one in ("safetensors", "gguf")}
        found += [one for one in all_schemes() if one.weight_bytes(shape) < most[one.format] and one.name != own.name]
    return [one for one in found if (one.name in wanted if wanted else one is own or not one.risky)]


@cache
def all_schemes() -> tuple[Scheme, ...]:
    """Return the catalogue's schemes."""
    return tuple(_read(Scheme, name) for name in catalog.names("scheme"))


@cache
def scheme(name: str) -> Scheme:
    """Return a scheme of the catalogue."""
    return _read(Scheme, name)


@cache
def device(name: str) -> Device:
    """Return a device of the catalogue."""
    return _read(Device, name)


def this_machine(host: Host) -> tuple[Device, int]:
    """Return the machine that we run on as a device of the catalogue, or as a CPU, and how many there are."""
    return local_device.this_machine(host, [device(name) for name in catalog.names("device")])


def coefficients(calibrated: Sequence[Coefficients] = ()) -> list[Coefficients]:
    """Return the fitted coefficients, this machine's own first."""
    return [*calibrated, *(_read(Coefficients, name) for name in catalog.names("coefficients"))]


def fitted(known: Iterable[Coefficients], engine: str, on: Device, scheme: str | None) -> Coefficients:
    """Return the coefficients for an engine on a device: for its very name and scheme, else for what is nearest."""
    mine = [one for one in known if one.engine == engine]
    for key in (on.name, on.vendor):
        near = [one for one in mine if key in one.devices]
        near.sort(key=lambda one: (one.scheme != scheme, one.scheme is not None))
        if near and key == on.name:
            return near[0] if near[0].scheme in (None, scheme) else _less_sure(near[0], f"measured in {near[0].scheme}")
        if near:
            return _less_sure(near[0], "none of them on such a device")
    scheduling = engines.get(engine).scheduling
    apart = scheduling is not None and scheduling.apart
    return Coefficients(
        name="datasheet", engine=engine, apart=apart, source="the datasheet alone: nothing was measured"
    )


def _less_sure(one: Coefficients, because: str) -> Coefficients:
    """What was measured elsewhere, or in another number format, says less."""

    def wide(spread: Spread) -> Spread:
        return spread.model_copy(update={"low": spread.low**2, "high": spread.high**2})

    update = {"ttft": wide(one.ttft), "tpot": wide(one.tpot), "source": f"{one.source}, {because}"}
    return one.model_copy(update=update)


D = TypeVar("D", Scheme, Device, Coefficients)


def _read(kind: type[D], name: str) -> D:
    document = documents.parse(catalog.text(kind.kind, name), source=name)
    assert isinstance(document, kind)
    return document


def _promising(fitting: list[Fitting], order: PlanSpec) -> list[Fitting]:
    """Return what is worth a simulation: the cheapest by the fluid estimate, and some of every device."""

    def price(one: Fitting) -> float:
        return one.option.offer.usd_per_h * one.option.split.devices / max(one.flow.rate_per_s, 1e-9)

    ordered = sorted(fitting, key=price)
    chosen: list[Fitting] = []
    per_device: dict[str, int] = {}
    for one in ordered:
        name = one.option.offer.device.name or ""
        if len(chosen) < _SIMULATED or per_device.get(name, 0) < _PER_DEVICE:
            chosen.append(one)
            per_device[name] = per_device.get(name, 0) + 1
            if order.drafting.tokens:
                chosen.append(_drafted(one, order.drafting))
    return chosen


def _drafted(one: Fitting, drafting: Drafting) -> Fitting:
    """Return the same with speculation; its flow is found again before it is played."""
    option = one.option.with_drafts(drafting)
    return Fitting(option, predict.server(option, one.on.times.coefficients), one.flow)


def _corrected(one: Fitting, lengths: Lengths, slo: SLO) -> Fitting:
    """Take into account what measured rows teach beside the roofline, at the batch that a steady flow would make."""
    users = max(1.0, one.flow.rate_per_s * one.flow.answer_s)
    found = predict.closed_loop(one.on.times, users, lengths)
    on = Server(residual_model.corrected(one.option.engine, one.on.times, found), one.on.limits)
    return Fitting(one.option, on, predict.fluid(on, lengths, slo))


def _candidate(one: Fitting, predicted: predict.Prediction, requests: Requests, order: PlanSpec) -> Candidate:
    option, own, flow = one.option, one.on.times.coefficients, one.flow
    rate, lengths = predicted.rate_per_s, requests.lengths
    usd_per_h = option.offer.usd_per_h * option.split.devices
    goodput = Interval(rate, rate / own.tpot.high, rate / own.tpot.low)
    per_request = usd_per_h / 3600 / rate
    in_and_out = (lengths.prompt + lengths.output) / 1e6

    def cost(at: float) -> float:
        return usd_per_h / 3600 / at / in_and_out

    names = sorted({"p50", *(f"p{share * 100:g}" for _, share, _ in order.slo.bounds())})
    return Candidate(
        device=option.offer.device.name or "",
        devices=option.split.devices,
        engine=option.engine,
        scheme=option.scheme.name or "",
        kv_format=option.kv_format,
        split=option.how,
        memory=option.memory,
        sequences=option.choice.sequences,
        goodput_per_s=goodput,
        ttft_s=predict.percentiles(predicted.outcome.ttft, own.ttft, names),
        tpot_s=predict.percentiles(predicted.outcome.tpot, own.tpot, names),
        replicas=math.ceil(order.load_per_s / rate) if order.load_per_s else 1,
        usd_per_h=usd_per_h,
        usd_per_1m_input=per_request * flow.prefill_share / lengths.prompt * 1e6,
        usd_per_1m_output=per_request * (1 - flow.prefill_share) / lengths.output * 1e6,
        usd_per_1m_tokens=Interval(cost(rate), cost(goodput.high), cost(goodput.low)),
        limited_by=flow.limited_by,
        known=own.source or own.name or "",
        priced=option.offer.priced,
        deployment=option.deployment(),
    )


def _too_slow(one: Fitting, requests: Requests, slo: SLO) -> Rejection:
    option, alone = one.option, predict.outcome(one.on, requests, one.flow.rate_per_s / 100)
    parts = []
    for metric, share, limit in slo.bounds():
        values = sorted(getattr(alone, "tpot" if metric == "itl" else metric))
        value = statistics.quantile(values, share) if values else math.inf
        if value > limit:
            parts.append(
                f"{metric.upper()} p{share * 100:g} is {value * 1e3:.0f} ms alone and {limit * 1e3:.0f} is promised"
            )
    return Rejection(
        device=option.offer.device.name or "",
        engine=option.engine,
        scheme=option.scheme.name or "",
        what=f"{option.kv_format} KV on {option.how}",
        reason="; ".join(parts) or "no load keeps the SLO",
        remedy="more devices for each replica, a smaller scheme, or a looser SLO",
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
        "longest_tokens": lengths.longest,
        "known_prompt_share": lengths.known_share,
    }
