"""Knobs: typed config fields, written as a flag, a pair of flags, or an environment variable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from powerband.core.deployment import EngineConfig


@dataclass(frozen=True)
class Knob:
    """The lever that a field belongs to, and its spelling where that is not `--field-name VALUE`."""

    lever: str
    flag: str | None = None
    off: str | None = None  # the flag for False; None: False omits the flag
    env: bool = False  # True: an environment variable with the name of the field
    join: str | None = None  # separator of several values in one argument; None: one argument each


def knob_of(config: type[EngineConfig], field: str) -> Knob | None:
    """Return the knob of a config field; None: the adapter writes it itself."""
    return next((item for item in config.model_fields[field].metadata if isinstance(item, Knob)), None)


def knobs(config: type[EngineConfig]) -> Iterator[tuple[str, Knob]]:
    """Yield every field that is a knob, in declaration order."""
    for field in config.model_fields:
        if (knob := knob_of(config, field)) is not None:
            yield field, knob


def spelling(field: str, knob: Knob) -> str:
    """Return the flag or the environment variable of a knob."""
    return field if knob.env else knob.flag or "--" + field.replace("_", "-")


def arguments(config: EngineConfig) -> tuple[str, ...]:
    """Return the flags of every knob that is set."""
    argv: list[str] = []
    for field, knob in knobs(type(config)):
        value = getattr(config, field)
        if value is None or value == () or knob.env:
            continue
        flag = spelling(field, knob)
        if isinstance(value, bool):
            switch = flag if value else knob.off
            argv += [switch] if switch else []
        elif isinstance(value, tuple):
            values = [_text(item) for item in value]
            argv += [flag, knob.join.join(values)] if knob.join else [flag, *values]
        else:
            argv += [flag, _text(value)]
    return (*argv, *config.extra_args)


def environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables of every knob that is set."""
    env = {}
    for field, knob in knobs(type(config)):
        value = getattr(config, field)
        if knob.env and value is not None:
            env[field] = str(int(value)) if isinstance(value, bool) else str(value)
    return {**env, **config.extra_env}


def flags(config: type[EngineConfig]) -> set[str]:
    """Return every flag that a config of this type can emit."""
    found = set()
    for field, knob in knobs(config):
        if not knob.env:
            found.add(spelling(field, knob))
            if knob.off:
                found.add(knob.off)
    return found


def _text(value: Any) -> str:
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return str(value)
