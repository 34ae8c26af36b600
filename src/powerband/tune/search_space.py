"""The search space: engines, the quantization schemes each can load, and the levers each offers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import powerband.plan as plan
from powerband import engines
from powerband.core.engine import Lever
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.study import ENGINE, Settings
from powerband.engines.base import Engine
from powerband.errors import InputError
from powerband.plan.options import of_weights
from powerband.store.schemes import support

WEIGHTS, REPLICAS, KV_CACHE = "weights", "replicas", "kv_cache"
Key = tuple[tuple[str, str], ...]
_MIN_CORES = 4  # of each replica, if there are more than two


@dataclass(frozen=True)
class SearchSpace:
    """The levers of each engine, the weights' scheme first, and the knobs that every deployment sets."""

    by_engine: Mapping[str, tuple[Lever, ...]]
    always: Mapping[str, Mapping[str, Any]]
    fast_start: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # knobs for the reference
    cannot_run: Mapping[Key, str] = field(default_factory=dict)  # combinations that are left out, and why

    @property
    def all_defaults(self) -> dict[str, Settings]:
        """Return the default settings of each engine."""
        return {engine: self.defaults(engine) for engine in self.by_engine}

    def defaults(self, engine: str) -> Settings:
        """Return the default settings of an engine: unquantized weights, and the first setting of each lever."""
        return {ENGINE: engine} | {one.name: next(iter(one.settings)) for one in self.by_engine[engine]}

    def non_default(self, settings: Settings) -> dict[str, str]:
        """Return the settings that differ from the engine's defaults."""
        default = self.defaults(settings[ENGINE])
        return {name: setting for name, setting in settings.items() if setting != default[name]}

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return the engine's knobs."""
        engine = settings[ENGINE]
        found = dict(self.always[engine])
        for lever in self.by_engine[engine]:
            if lever.name != WEIGHTS:  # a scheme is no knob, and the reference's scheme can be outside the space
                found |= lever.settings[settings[lever.name]]
        return found

    def document(self, settings: Settings, source: str) -> dict[str, Any]:
        """Return the deployment with these settings of the weights at `source`."""
        data = {"variant": {"source": source}, "engine": settings[ENGINE], "config": self.config(settings)}
        replicas = int(settings.get(REPLICAS, "1"))
        return data | ({"placement": {"replicas": replicas}} if replicas > 1 else {})

    def quality_settings(self, settings: Settings) -> Settings:
        """Return the settings that can change answers: deployments that share them share the quality verdict."""
        names = {ENGINE} | {one.name for one in self.by_engine[settings[ENGINE]] if one.affects_quality}
        return {name: setting for name, setting in settings.items() if name in names}

    def with_lever(self, engine: str, changed: Lever) -> SearchSpace:
        """Return the space with one lever of an engine replaced, or removed if a single setting is left."""
        levers = [changed if one.name == changed.name else one for one in self.by_engine[engine]]
        kept = tuple(one for one in levers if one is not changed or len(changed.settings) > 1)
        return replace(self, by_engine={**self.by_engine, engine: kept})

    def __iter__(self) -> Iterator[Settings]:
        for engine in self.by_engine:
            yield from (one for one in self.of(engine) if not self.cannot_run or key(one) not in self.cannot_run)

    def of(self, engine: str) -> Iterator[Settings]:
        """Return all combinations of an engine's levers."""
        levers = self.by_engine[engine]
        for chosen in itertools.product(*(lever.settings for lever in levers)):
            yield {ENGINE: engine} | dict(zip((lever.name for lever in levers), chosen, strict=True))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def key(settings: Settings) -> Key:
    """Return settings as a hashable key."""
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
    """Return the space of the wanted engines on this machine; without `drafts` it has no speculation levers."""
    by_engine, always, fast_start = {}, {}, {}
    for name in wanted:
        engine = engines.get(name)
        space = engine.space(model=model, host=host, context=context)
        levers = tuple(_supported(one, name, host) for one in space.levers if drafts or not one.drafts)
        if engine.reads_weights:
            loadable = _schemes(engine, model, host, schemes)
            if not loadable:
                continue
            settings: dict[str, dict[str, Any]] = {one: {} for one in loadable}
            levers = (Lever(name=WEIGHTS, settings=settings, affects_quality=True), *levers, *_replicas(host))
        by_engine[name], always[name], fast_start[name] = levers, space.always, space.fast_start
    if not by_engine:
        asked = f"any of the schemes {', '.join(schemes)}" if schemes else "any scheme this machine can run"
        raise InputError(
            f"{' or '.join(wanted)} cannot load {model.source} in {asked}",
            hint="give other schemes, or omit --scheme",
        )
    return SearchSpace(by_engine, always, fast_start)


def _replicas(host: Host) -> list[Lever]:
    """Return the lever that divides the cores of a machine without GPUs among several replicas."""
    cores = len(host.core_threads) or len(host.cores)
    counts = [n for n in (2, 4, 8) if not host.gpus and cores // n >= (1 if n == 2 else _MIN_CORES)]
    return [Lever(name=REPLICAS, settings={str(n): {} for n in (1, *counts)})] if counts else []


def _schemes(engine: Engine[Any], model: Model, host: Host, wanted: Sequence[str]) -> list[str]:
    """Return the schemes an engine can load and this machine can run: documented ones first, then by bits."""
    device, _ = plan.this_machine(host)
    able = [one for one in plan.eligible_schemes(model, wanted=wanted) if one.format in engine.formats]
    facts = {one.name or "": of_weights(engine.name, one, device, model) for one in able}
    able.sort(key=lambda one: (facts[one.name or ""] is None, -one.linear_bits))
    return [name for one in able if (fact := facts[name := one.name or ""]) is None or fact.usable]


def _supported(lever: Lever, engine: str, host: Host) -> Lever:
    """Return the lever without the KV formats that are documented not to work on this machine."""
    if lever.name != KV_CACHE or (table := support(engine)) is None:
        return lever
    device, _ = plan.this_machine(host)
    facts = {name: table.of_kv(name, device.family) for name in lever.settings}
    kept = {name: lever.settings[name] for name, fact in facts.items() if fact is None or fact.usable}
    return lever.model_copy(update={"settings": kept})
