"""Engine adapters: one inference server per module. The module name is the engine name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from powerband.core.deployment import Deployment
from powerband.core.document import HEADER
from powerband.engines.base import Engine
from powerband.errors import InputError, did_you_mean

_NOT_ENGINES = frozenset({"base", "knobs", "live", "rules"})


@cache
def names() -> tuple[str, ...]:
    """Return the names of all engines."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_ENGINES))


@cache
def get(name: str) -> Engine[Any]:
    """Return the adapter of an engine."""
    if name not in names():
        raise InputError(
            f"unknown engine '{name}'.{did_you_mean(name, names())}",
            hint=f"engines: {', '.join(names())}",
        )
    engine: Engine[Any] = importlib.import_module(f"{__name__}.{name}").ENGINE
    return engine


def deployment_type(name: str) -> type[Deployment[Any]]:
    """Return the Deployment class whose config has the knobs of an engine."""
    typed: type[Deployment[Any]] = Deployment.__class_getitem__(get(name).config_type)  # type: ignore[assignment]
    return typed


def deployment_of(data: Mapping[str, Any]) -> Deployment[Any]:
    """Build a deployment from plain data, with or without the document header."""
    plain = {key: value for key, value in data.items() if key != HEADER}
    return deployment_type(plain["engine"]).model_validate(plain)
