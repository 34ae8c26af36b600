"""How a typed knob becomes what the engine reads: a flag, a pair of flags, or an environment variable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from powerband.core.deployment import EngineConfig


@dataclass(frozen=True)
class Knob:
    """What the lever is for, and how it is spelled where the spelling is not `--the-name VALUE`."""

    lever: str
    flag: str | None = None
    off: str | None = None  # how False is said; None: it is said by leaving the flag away
    env: bool = False
    join: str | None = None  # several values in one argument, separated by this


def knob_of(config: type[EngineConfig], field: str) -> Knob | None:
    """Return the knob behind a config's field; None for fields that the adapter spells itself."""
    return next((item for item in config.model_fields[field].metadata if isinstance(item, Knob)), None)


def knobs(config: type[EngineConfig]) -> Iterator[tuple[str, Knob]]:
    """Yield every field that is a knob, in the order in which they are declared."""
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
            said = flag if value else knob.off
            argv += [said] if said else []
        elif isinstance(value, tuple):
            words = [_word(item) for item in value]
            argv += [flag, knob.join.join(words)] if knob.join else [flag, *words]
        else:
            argv += [flag, _word(value)]
    return (*argv, *config.extra_args)


def environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables of every knob that is one and is set."""
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


def _word(value: Any) -> str:
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json", exclude_none=True), separators=(",", ":"))
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return str(value)
