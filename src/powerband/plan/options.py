"""Enumerate the options on a device: engine, scheme, KV format and split, each with its memory use or a rejection."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from powerband import engines
from powerband.core.device import Device
from powerband.core.engine import EngineSettings, Footprint, Scheduling
from powerband.core.host import Gpu, Host, NumaNode
from powerband.core.model import Model
from powerband.core.plan import Memory, Rejection
from powerband.core.scheme import Scheme
from powerband.core.shape import Shape
from powerband.core.units import about_bytes
from powerband.plan.step_time import NO_SPECULATION, Speculation
from powerband.plan.step_work import Split, Steps


@dataclass(frozen=True)
class Offer:
    """A number of devices of one kind that may be used, at a price per device."""

    device: Device
    count: int
    usd_per_h: float
    requested_as: str = ""  # the name that the user gave, if it is not the device's own name

    @property
    def price_source(self) -> str:
        """Return the source and date of the price."""
        price = self.device.price
        return f"{price.source}, {price.as_of}" if price.usd_per_h == self.usd_per_h else "given by you"


@dataclass(frozen=True)
class Lengths:
    """The lengths of the workload's requests, in tokens."""

    prompt: float  # mean
    output: float  # mean
    max_tokens: int  # context length that fits every request
    cached_share: float = 0.0  # share of the prompt tokens that an earlier request left in the KV cache

    @property
    def mean_kv_tokens(self) -> float:
        """Return the KV-cache tokens of a request, averaged over its decoding."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Option:
    """One way to serve the model that fits in memory."""

    offer: Offer
    engine: str
    scheme: Scheme
    kv_format: str
    split: Split
    memory: Memory
    settings: EngineSettings
    shape: Shape
    speculation: Speculation = NO_SPECULATION

    def with_speculation(self, speculation: Speculation) -> Option:
        """Return the same option with speculative decoding."""
        settings = self.settings.model_copy(update={"drafted": speculation.tokens})
        return replace(self, settings=settings, speculation=speculation)

    @property
    def layout(self) -> str:
        """Return the split and the number of draft tokens, as 'tp2 spec4'."""
        drafts = f"spec{self.speculation.tokens}" if self.speculation.tokens else ""
        split = str(self.split) if self.split.devices > 1 or not drafts else ""
        return " ".join(part for part in (split, drafts) if part)

    @cached_property
    def steps(self) -> Steps:
        """Return the work of its steps."""
        scheduling = engines.get(self.engine).scheduling
        assert scheduling is not None
        return Steps(self.shape, self.scheme, self.split, kv_bytes=scheduling.kv_formats[self.kv_format])

    def deployment(self) -> dict[str, Any]:
        """Return the data of its deployment file."""
        config = engines.get(self.engine).knobs_for(self.settings)
        variant = {"source": self.settings.source, "scheme": self.scheme.name}
        data = {"variant": variant, "engine": self.engine, "config": config}
        return engines.deployment_type(self.engine).model_validate(data).to_data(units=True)


def options(
    model: Model, offer: Offer, lengths: Lengths, schemes: list[Scheme], *, wanted_engine: str | None = None
) -> Iterator[Option | Rejection]:
    """Yield every option that fits, and a rejection for every scheme that does not."""
    assert model.shape is not None
    for engine in offer.device.engines:
        if wanted_engine not in (None, engine):
            continue
        tried_groups: set[str] = set()
        for scheme in schemes:
            if scheme.format not in engines.get(engine).formats or scheme.group in tried_groups:
                continue
            if scheme.needs and scheme.needs not in offer.device.tflops:
                reason = f"{scheme.name} computes in {scheme.needs}, which {offer.device.name} does not support"
                remedy = f"a scheme that computes in one of: {', '.join(offer.device.tflops)}"
                yield _rejection(offer, engine, scheme, "any split", reason, remedy)
                continue
            tried_groups |= {scheme.group} if scheme.group else set()
            yield from _options_in(model, offer, engine, scheme, lengths)


def _options_in(
    model: Model, offer: Offer, engine: str, scheme: Scheme, lengths: Lengths
) -> Iterator[Option | Rejection]:
    """Yield the options in one scheme; if none fits, the rejection of the largest split."""
    scheduling, shape = engines.get(engine).scheduling, model.shape
    assert scheduling is not None and shape is not None
    fits, rejection = False, None
    for split in _splits(shape, offer, scheduling):
        for kv_format in scheduling.kv_formats:
            found = _fit(model, offer, engine, scheme, kv_format, split, lengths, scheduling)
            if isinstance(found, Option):
                fits = True
                yield found
            else:
                rejection = found
    if not fits and rejection is not None:
        yield rejection


def _splits(shape: Shape, offer: Offer, scheduling: Scheduling) -> Iterator[Split]:
    """Yield the splits to try, smallest first; tensor parallelism stays within a node, pipelines may span nodes."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= offer.count]
    for devices in sizes:
        if not scheduling.tensor_parallel:
            yield Split(pipeline=devices)
            continue
        for pipeline in (1, 2, 4):
            tensor = devices // pipeline
            divides = devices % pipeline == 0 and shape.heads % tensor == 0 and shape.depth >= 2 * pipeline
            if not divides or tensor > offer.device.node or (pipeline > 1 and tensor < 2):
                continue
            yield Split(tensor=tensor, pipeline=pipeline)
            if shape.experts and tensor > 1:
                yield Split(tensor=tensor, pipeline=pipeline, expert=tensor)
                if pipeline == 1:
                    yield Split(data=tensor, expert=tensor)


def _fit(
    model: Model,
    offer: Offer,
    engine: str,
    scheme: Scheme,
    kv_format: str,
    split: Split,
    lengths: Lengths,
    scheduling: Scheduling,
) -> Option | Rejection:
    """Return the option with its memory use, or a rejection if one sequence does not fit."""
    device, shape = offer.device, model.shape
    assert shape is not None
    on_cpu = device.vendor == "cpu"
    steps = Steps(shape, scheme, split, kv_bytes=scheduling.kv_formats[kv_format])
    context = lengths.max_tokens
    settings = EngineSettings(
        source=model.source,
        scheme=scheme.name or "",
        kv_format=kv_format,
        tensor=split.tensor,
        pipeline=split.pipeline,
        data=split.data,
        expert=split.expert > 1,
        on_cpu=on_cpu,
        sequences=1,
        batched_tokens=scheduling.cpu_batched_tokens if on_cpu else scheduling.batched_tokens,
        context=context,
        kv_bytes=0,
    )
    fixed = _footprint(settings, model, engine, device, split)
    engine_bytes = fixed.activations_bytes + fixed.overhead_bytes
    usable = device.memory * scheduling.memory_share
    weights = steps.weight_bytes
    free = usable - weights - fixed.activations_bytes - fixed.overhead_bytes
    one_sequence = steps.kv_of(context)
    if free < one_sequence:
        missing = one_sequence - free
        reason = (
            f"{about_bytes(weights)} of weights, {about_bytes(engine_bytes)} for the engine and "
            f"{about_bytes(one_sequence)} of KV cache (one sequence of {context} tokens) need "
            f"{about_bytes(usable + missing)} per device; {about_bytes(usable)} is usable"
        )
        what = f"{kv_format} KV on {split}"
        return _rejection(offer, engine, scheme, what, reason, _memory_remedy(steps, missing, offer, split))
    # llama.cpp reserves the full context for each slot; vLLM allocates KV-cache blocks on demand.
    kv_per_sequence = steps.kv_of(lengths.mean_kv_tokens) if scheduling.tensor_parallel else one_sequence
    sequences = min(scheduling.cpu_sequences if on_cpu else scheduling.sequences, int(free / kv_per_sequence))
    kv_bytes = int(free) // 2**20 * 2**20 * split.devices
    settings = settings.model_copy(update={"sequences": max(1, sequences), "kv_bytes": kv_bytes})
    memory = Memory(
        device=device.memory,
        weights=int(weights),
        activations=fixed.activations_bytes,
        overhead=fixed.overhead_bytes,
        kv_cache=int(free),
        kv_per_token=one_sequence / context,
        max_sequence_tokens=int(free / (one_sequence / context)),
        sequences=int(free / steps.kv_of(lengths.mean_kv_tokens)) * split.data,
    )
    return Option(offer, engine, scheme, kv_format, split, memory, settings, shape)


def _footprint(settings: EngineSettings, model: Model, engine: str, device: Device, split: Split) -> Footprint:
    """Return the engine adapter's estimate of its memory besides weights and KV cache."""
    adapter = engines.get(engine)
    data = {"variant": {"source": model.source}, "engine": engine, "config": adapter.knobs_for(settings)}
    deployment = engines.deployment_type(engine).model_validate(data)
    return adapter.footprint(deployment, model=model, host=host_of(device, split.devices))


def host_of(device: Device, count: int) -> Host:
    """Return a host with this many of a device, as engine adapters expect it."""
    gpus = (
        ()
        if device.vendor == "cpu"
        else tuple(
            Gpu(index=number, name=device.name or "", memory_bytes=device.memory, free_bytes=device.memory, driver="")
            for number in range(count)
        )
    )
    return Host(
        system="Linux",
        machine="x86_64",
        cpu_name="",
        cores=tuple(range(8)),
        numa_nodes=(NumaNode(index=0, memory_bytes=device.memory, available_bytes=device.memory),),
        memory_bytes=device.memory,
        available_bytes=device.memory,
        gpus=gpus,
    )


def _memory_remedy(steps: Steps, missing: float, offer: Offer, split: Split) -> str:
    """Return what would make an option fit that lacks this many bytes per device."""
    remedies = []
    weights = steps.weight_bytes
    if weights > missing:
        factor = weights / (weights - missing)
        remedies.append(f"a scheme with {steps.scheme.linear_bits / factor:.1f} bits or less")
    if offer.count <= split.devices:
        growth = 1 + missing / max(weights - missing, weights / 8)
        needed = 2 ** math.ceil(math.log2(max(2.0, split.devices * growth)))
        remedies.append(f"{needed} devices" if needed <= 64 else "a larger device")
    remedies.append("a shorter context")
    return ", or ".join(remedies)


def _rejection(offer: Offer, engine: str, scheme: Scheme, what: str, reason: str, remedy: str) -> Rejection:
    return Rejection(
        device=offer.device.name or "", engine=engine, scheme=scheme.name or "", what=what, reason=reason, remedy=remedy
    )
