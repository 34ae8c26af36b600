"""What could be tried on a device: every engine, scheme, KV format and split, with the room it leaves, or why not."""

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
from powerband.plan.step_time import NO_DRAFTS, Drafting
from powerband.plan.step_work import Split, Steps


@dataclass(frozen=True)
class Offer:
    """So many devices of one kind, at a price."""

    device: Device
    count: int
    usd_per_h: float

    @property
    def priced(self) -> str:
        """Say where the price comes from."""
        told = self.device.price
        return f"of {told.as_of}: {told.source}" if told.usd_per_h == self.usd_per_h else "yours"


@dataclass(frozen=True)
class Lengths:
    """What the workload's requests ask for, in tokens."""

    prompt: float
    output: float
    longest: int
    known_share: float = 0.0  # of the prompt tokens, by an earlier request

    @property
    def held(self) -> float:
        """Return the tokens that a request keeps on average while it is written."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Option:
    """One way to serve that fits."""

    offer: Offer
    engine: str
    scheme: Scheme
    kv_format: str
    split: Split
    memory: Memory
    choice: EngineSettings
    shape: Shape
    drafting: Drafting = NO_DRAFTS

    def with_drafts(self, drafting: Drafting) -> Option:
        """Return the same with speculation."""
        return replace(self, choice=self.choice.model_copy(update={"drafted": drafting.tokens}), drafting=drafting)

    @property
    def how(self) -> str:
        """Say how it is spread, and whether it speculates."""
        drafts = f"spec{self.drafting.tokens}" if self.drafting.tokens else ""
        return " ".join(
            part for part in (str(self.split) if self.split.devices > 1 or not drafts else "", drafts) if part
        )

    @cached_property
    def steps(self) -> Steps:
        """Return the work of its steps."""
        scheduling = engines.get(self.engine).scheduling
        assert scheduling is not None
        return Steps(self.shape, self.scheme, self.split, kv_bytes=scheduling.kv_formats[self.kv_format])

    def deployment(self) -> dict[str, Any]:
        """Return the deployment file's data."""
        config = engines.get(self.engine).knobs_for(self.choice)
        variant = {"source": self.choice.source, "scheme": self.scheme.name}
        data = {"variant": variant, "engine": self.engine, "config": config}
        return engines.deployment_type(self.engine).model_validate(data).to_data(units=True)


def options(
    model: Model, offer: Offer, lengths: Lengths, schemes: list[Scheme], *, wanted_engine: str | None = None
) -> Iterator[Option | Rejection]:
    """Yield what fits and what does not."""
    assert model.shape is not None
    for engine in offer.device.engines:
        if wanted_engine not in (None, engine):
            continue
        alike: set[str] = set()
        for scheme in schemes:
            if scheme.format not in engines.get(engine).formats or scheme.group in alike:
                continue
            if scheme.needs and scheme.needs not in offer.device.tflops:
                reason = f"{scheme.name} multiplies in {scheme.needs}, which {offer.device.name} cannot"
                yield _rejection(offer, engine, scheme, "any split", reason, "take a scheme that it can")
                continue
            alike |= {scheme.group} if scheme.group else set()
            yield from _splits(model, offer, engine, scheme, lengths)


def _splits(model: Model, offer: Offer, engine: str, scheme: Scheme, lengths: Lengths) -> Iterator[Option | Rejection]:
    scheduling, shape = engines.get(engine).scheduling, model.shape
    assert scheduling is not None and shape is not None
    fits, short = False, None
    for split in _ways(shape, offer, scheduling):
        for kv_format in scheduling.kv_formats:
            found = _fit(model, offer, engine, scheme, kv_format, split, lengths, scheduling)
            if isinstance(found, Option):
                fits = True
                yield found
            else:
                short = found
    if not fits and short is not None:
        yield short


def _ways(shape: Shape, offer: Offer, scheduling: Scheduling) -> Iterator[Split]:
    """Yield the splits worth trying, the smallest first; a larger one than the node is a pipeline."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= offer.count]
    for devices in sizes:
        if not scheduling.cuts_tensors:
            yield Split(pipeline=devices)
            continue
        for pipeline in (1, 2, 4):
            tensor = devices // pipeline
            whole = devices % pipeline == 0 and shape.heads % tensor == 0 and shape.depth >= 2 * pipeline
            if not whole or tensor > offer.device.node or (pipeline > 1 and tensor < 2):
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
    device, shape = offer.device, model.shape
    assert shape is not None
    on_cpu = device.vendor == "cpu"
    steps = Steps(shape, scheme, split, kv_bytes=scheduling.kv_formats[kv_format])
    context = lengths.longest
    choice = EngineSettings(
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
    fixed = _fixed(choice, model, engine, device, split)
    usable = device.memory * scheduling.memory_share
    weights = steps.weight_bytes
    room = usable - weights - fixed.activations_bytes - fixed.overhead_bytes
    one = steps.kv_of(context)
    what = f"{kv_format} KV on {split}"
    if room < one:
        missing = one - room
        said = (
            f"{about_bytes(weights)} of weights, {about_bytes(fixed.activations_bytes + fixed.overhead_bytes)} for the "
            f"engine and {about_bytes(one)} of KV cache for one sequence of {context} tokens need "
            f"{about_bytes(usable + missing)} on each device, and {about_bytes(usable)} may be used"
        )
        return _rejection(offer, engine, scheme, what, said, _remedy(steps, missing, offer, split))
    sequences = min(
        scheduling.cpu_sequences if on_cpu else scheduling.sequences,
        # slots of llama.cpp hold the longest context each; vLLM's pages are taken as they are needed
        int(room / (steps.kv_of(lengths.held) if scheduling.cuts_tensors else one)),
    )
    kv_bytes = int(room) // 2**20 * 2**20 * split.devices
    choice = choice.model_copy(update={"sequences": max(1, sequences), "kv_bytes": kv_bytes})
    memory = Memory(
        device=device.memory,
        weights=int(weights),
        activations=fixed.activations_bytes,
        overhead=fixed.overhead_bytes,
        kv_cache=int(room),
        kv_per_token=one / context,
        longest=int(room / (one / context)),
        sequences=int(room / steps.kv_of(lengths.held)) * split.data,
    )
    return Option(offer, engine, scheme, kv_format, split, memory, choice, shape)


def _fixed(choice: EngineSettings, model: Model, engine: str, device: Device, split: Split) -> Footprint:
    """Return what the engine takes besides weights and KV cache, by its own adapter's word."""
    adapter = engines.get(engine)
    data = {"variant": {"source": model.source}, "engine": engine, "config": adapter.knobs_for(choice)}
    deployment = engines.deployment_type(engine).model_validate(data)
    return adapter.footprint(deployment, model=model, host=host_of(device, split.devices))


def host_of(device: Device, count: int) -> Host:
    """Return a machine with so many of a device, as the adapters know machines."""
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


def _remedy(steps: Steps, missing: float, offer: Offer, split: Split) -> str:
    """Say what would make it fit."""
    ways = []
    over = steps.weight_bytes
    if over > missing:
        factor = over / (over - missing)
        ways.append(f"a scheme with {steps.scheme.linear_bits / factor:.1f} bits or less")
    if offer.count <= split.devices:
        needed = 2 ** math.ceil(math.log2(max(2.0, split.devices * (1 + missing / max(over - missing, over / 8)))))
        ways.append(f"{needed} devices" if needed <= 64 else "a larger device")
    ways.append("a shorter context")
    return ", or ".join(ways)


def _rejection(offer: Offer, engine: str, scheme: Scheme, what: str, reason: str, remedy: str) -> Rejection:
    return Rejection(
        device=offer.device.name or "", engine=engine, scheme=scheme.name or "", what=what, reason=reason, remedy=remedy
    )
