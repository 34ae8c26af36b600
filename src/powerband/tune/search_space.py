"""What may be tried: engines, the schemes that each can load, and what each lets one turn."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powerband import engines, plan
from powerband.core.engine import Lever
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.study import Settings
from powerband.errors import InputError

ENGINE, WEIGHTS = "engine", "weights"
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SearchSpace:
    """By engine: what can be turned, the weights' scheme first, and what must be said in any case."""

    by_engine: Mapping[str, tuple[Lever, ...]]
    always: Mapping[str, Mapping[str, Any]]
    sooner: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what makes a start quick

    def defaults(self, engine: str) -> Settings:
        """Return an engine as it comes: nothing quantized, nothing turned."""
        return {ENGINE: engine} | {one.name: next(iter(one.settings)) for one in self.by_engine[engine]}

    def turned(self, settings: Settings) -> dict[str, str]:
        """Return what differs from the engine's defaults."""
        default = self.defaults(settings[ENGINE])
        return {name: setting for name, setting in settings.items() if setting != default[name]}

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return the engine's knobs."""
        engine = settings[ENGINE]
        found = dict(self.always[engine])
        for lever in self.by_engine[engine]:
            if lever.name != WEIGHTS:  # a format is no knob, and the reference's need not be among those to try
                found |= lever.settings[settings[lever.name]]
        return found

    def answering(self, settings: Settings) -> Settings:
        """Return the settings that may change answers: deployments that share them share the gate's verdict."""
        spoiling = {ENGINE} | {one.name for one in self.by_engine[settings[ENGINE]] if one.spoils}
        return {name: setting for name, setting in settings.items() if name in spoiling}

    def with_lever(self, engine: str, changed: Lever) -> SearchSpace:
        """Return the same with one lever of an engine replaced; without it where it has nothing left to turn."""
        held = [changed if one.name == changed.name else one for one in self.by_engine[engine]]
        kept = tuple(one for one in held if one is not changed or len(changed.settings) > 1)
        return replace(self, by_engine={**self.by_engine, engine: kept})

    def __iter__(self) -> Iterator[Settings]:
        for engine, search_space in self.by_engine.items():
            for chosen in itertools.product(*(lever.settings for lever in search_space)):
                yield {ENGINE: engine} | dict(zip((lever.name for lever in search_space), chosen, strict=True))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def key(settings: Settings) -> Key:
    """Return what tells settings apart."""
    return tuple(sorted(settings.items()))


def search_space(
    model: Model,
    host: Host,
    *,
    context: int,
    wanted: Sequence[str],
    schemes: Sequence[str] = (),
    drafts: bool = True,
) -> SearchSpace:
    """Return the levers of the wanted engines on this machine, those that guess tokens only where that is wanted."""
    by_engine, always, sooner = {}, {}, {}
    for name in wanted:
        engine = engines.get(name)
        space = engine.space(model=model, host=host, context=context)
        found = tuple(one for one in space.levers if drafts or not one.drafts)
        if engine.reads_weights:
            numbers = _schemes(model, host, engine.formats, schemes)
            if not numbers:
                continue
            settings: dict[str, dict[str, Any]] = {one: {} for one in numbers}
            found = (Lever(name=WEIGHTS, settings=settings, spoils=True), *found)
        by_engine[name], always[name], sooner[name] = found, space.always, space.sooner
    if not by_engine:
        raise InputError(
            f"none of {', '.join(wanted)} can load {model.source} in a scheme that was asked for",
            hint="name other schemes, or leave --scheme away",
        )
    return SearchSpace(by_engine, always, sooner)


def _schemes(model: Model, host: Host, formats: Collection[str], wanted: Sequence[str]) -> list[str]:
    """Return the schemes that an engine can load and this machine can run, the widest first."""
    device, _ = plan.this_machine(host)
    able = [
        one
        for one in plan.eligible(model, wanted=wanted)
        if one.format in formats and one.needs in (None, *device.tflops)
    ]
    return [one.name or "" for one in sorted(able, key=lambda one: -one.linear_bits)]
