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
from powerband.core.family import LABELS
from powerband.core.host import Gpu, Host, NumaNode
from powerband.core.model import Model
from powerband.core.plan import Memory, Rejection
from powerband.core.scheme import Scheme
from powerband.core.shape import Shape
from powerband.core.support import Fact
from powerband.core.units import about_bytes
from powerband.plan.step_time import NO_SPECULATION, Speculation
from powerband.plan.step_work import Split, Steps
from powerband.store.schemes import support

_CORES_PER_GPU, _HOST_BYTES_PER_GPU = 12, 128 * 2**30  # of a GPU server, at least


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

    @property
    def price_estimated(self) -> bool:
        """Return whether the price is an estimate of Powerband."""
        return self.device.price.estimated and self.device.price.usd_per_h == self.usd_per_h


@dataclass(frozen=True)
class Lengths:
    """The lengths of the workload's requests, in tokens."""

    prompt: float  # mean
    output: float  # mean
    max_tokens: int  # context length that fits every request
    cached_share: float = 0.0  # share of the prompt tokens that an earlier request left in the KV cache
    adapters: int = 0  # LoRA adapters that the requests use
    adapter_rank: int = 0  # the largest rank of them

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
    support: tuple[Fact | None, Fact | None] = (None, None)  # of the weights and of the KV format; None: not documented
    speculation: Speculation = NO_SPECULATION

    def with_speculation(self, speculation: Speculation) -> Option:
        """Return the same option with speculative decoding."""
        settings = self.settings.model_copy(update={"drafted": speculation.tokens})
        return replace(self, settings=settings, speculation=speculation)

    def with_default_batch(self) -> Option | None:
        """Return the option with the engine's default batch on this device; None if that is not larger."""
        sequences, tokens = engines.get(self.engine).default_batch(host_of(self.offer.device, self.split.devices))
        sequences = min(sequences, self.memory.sequences)
        if sequences <= self.settings.sequences:
            return None
        return replace(
            self, settings=self.settings.model_copy(update={"sequences": sequences, "batched_tokens": tokens})
        )

    @property
    def documented(self) -> bool:
        """Return whether the engine's documentation says that it runs, and not by emulation."""
        return all(one is not None and one.level != "emulated" for one in self.support)

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
    on_request = [one for one in offer.device.engines_on_request if one == wanted_engine]
    for engine in (*offer.device.engines, *on_request):
        if wanted_engine not in (None, engine):
            continue
        tried_groups: set[str] = set()
        kv_formats = _kv_formats(engine, offer.device)
        for name, fact in kv_formats.items():
            if fact and not fact.usable:
                what, remedy = f"{name} KV", "another KV format"
                yield _rejection(offer, engine, "any", what, _unsupported(offer, fact), remedy)
        usable = {name: fact for name, fact in kv_formats.items() if fact is None or fact.usable}
        loadable = [one for one in schemes if one.format in engines.get(engine).formats]
        known = [(one, of_weights(engine, one, offer.device, model)) for one in loadable]
        for scheme, fact in sorted(known, key=lambda pair: _preference(pair[1])):
            if scheme.group in tried_groups:
                continue
            if fact and not fact.usable:
                yield _rejection(offer, engine, scheme.name, "any split", _unsupported(offer, fact), "another scheme")
                continue
            tried_groups |= {scheme.group} if scheme.group else set()
            for found in _options_in(model, offer, engine, on_device(scheme, fact), list(usable), lengths):
                yield found if isinstance(found, Rejection) else replace(found, support=(fact, usable[found.kv_format]))


def _kv_formats(engine: str, device: Device) -> dict[str, Fact | None]:
    """Return the KV formats of an engine, and what is documented of each on a device."""
    scheduling, table = engines.get(engine).scheduling, support(engine)
    assert scheduling is not None
    return {one: table.of_kv(one, device.family) if table else None for one in scheduling.kv_formats}


def of_weights(engine: str, scheme: Scheme, device: Device, model: Model) -> Fact | None:
    """Return what is documented of a model's weights in a scheme on a device; None: nothing."""
    table = support(engine)
    return table.of_weights(scheme.name or "", device.family, experts=bool(model.experts)) if table else None


def on_device(scheme: Scheme, fact: Fact | None) -> Scheme:
    """Return the scheme as it computes where this is documented of it."""
    return scheme.weight_only() if fact and fact.level in ("weight-only", "emulated") else scheme


def _preference(fact: Fact | None) -> int:
    """Return the place of a scheme among those of its group: native, weight-only, the rest."""
    levels = ("native", "weight-only", "emulated")
    return levels.index(fact.level) if fact and fact.level in levels else len(levels)


def _unsupported(offer: Offer, fact: Fact) -> str:
    family = LABELS[offer.device.family] if offer.device.family else offer.device.name
    return f"not supported on {family}{f' ({fact.note})' if fact.note else ''}: {fact.source.url}, {fact.source.as_of}"


def _options_in(
    model: Model, offer: Offer, engine: str, scheme: Scheme, kv_formats: list[str], lengths: Lengths
) -> Iterator[Option | Rejection]:
    """Yield the options in one scheme; if none fits, the rejection of the largest split."""
    scheduling, shape = engines.get(engine).scheduling, model.shape
    assert scheduling is not None and shape is not None
    fits, rejection = False, None
    for split in _splits(shape, offer, scheduling):
        for kv_format in kv_formats:
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
        adapters=lengths.adapters,
        adapter_rank=lengths.adapter_rank,
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
        return _rejection(offer, engine, scheme.name, what, reason, _memory_remedy(steps, missing, offer, split))
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
    host = host_of(device, split.devices)
    found = adapter.footprint(deployment, model=model, host=host)
    if settings.adapters and not adapter.settings_of(deployment, model=model, host=host).adapters:
        # the engine has no slots for adapters, which its footprint would have: it loads each one whole
        assert model.shape is not None
        one_split = {"tensor": split.tensor, "pipeline": split.pipeline}
        adapters_bytes = model.shape.adapters_bytes(settings.adapters, settings.adapter_rank, **one_split)
        found = found.model_copy(update={"overhead_bytes": found.overhead_bytes + adapters_bytes})
    return found


def host_of(device: Device, count: int) -> Host:
    """Return a host with this many of a device, as its driver would report them."""
    gpus: list[Gpu] = []
    if device.vendor != "cpu":
        gpus = [
            Gpu(
                index=number,
                name=(device.driver_names or (device.name or "",))[0],
                memory_bytes=device.memory,
                free_bytes=device.memory,
                driver="",
                uuid=f"{device.name}-{number}",
                compute_capability=device.compute_capability,
                vendor=device.vendor,
            )
            for number in range(count)
        ]
    memory = max(device.memory, _HOST_BYTES_PER_GPU * count) if gpus else device.memory
    return Host(
        system="Linux",
        machine="x86_64",
        cpu_name="",
        cores=tuple(range(_CORES_PER_GPU * count if gpus else 8)),
        numa_nodes=(NumaNode(index=0, memory_bytes=memory, available_bytes=memory),),
        memory_bytes=memory,
        available_bytes=memory,
        gpus=tuple(gpus),
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


def _rejection(offer: Offer, engine: str, scheme: str | None, what: str, reason: str, remedy: str) -> Rejection:
    return Rejection(
        device=offer.device.name or "", engine=engine, scheme=scheme or "", what=what, reason=reason, remedy=remedy
    )
