"""Change a server's command line: replace, add and remove the flags of settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powerband.engines import live


def changed(engine: str, argv: Sequence[str], wanted: Mapping[str, Any], removed: Iterable[str]) -> str:
    """Return a command line to paste, with some settings changed; keys are redacted."""
    words, variables = apply(engine, argv, wanted, removed)
    line = live.redacted(words)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), line])


def apply(
    engine: str, argv: Sequence[str], wanted: Mapping[str, Any], removed: Iterable[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the changed words, and the environment variables to set."""
    gone = {*removed, *wanted}
    kept = [word for one in live.arguments(engine, argv) if one.field not in gone for word in one.words]
    variables: dict[str, str] = {}
    for field, value in wanted.items():
        words, environment = live.flags(engine, field, value)
        kept += words
        variables |= environment
    return tuple(kept), variables


def spelling(engine: str, argv: Sequence[str], field: str) -> str:
    """Return a setting as the command line has it, or as the engine spells it."""
    for one in live.arguments(engine, argv) if argv else ():
        if one.field == field:
            return " ".join(one.words)
    words, variables = live.flags(engine, field, True)
    return words[0] if words else next(iter(variables))
