"""Limits of plain data from files that others wrote: depth, number of values, numbers, text."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
MAX_VALUES = 2_000_000
MAX_INTEGER = 2**64


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; raise ValueError if it is not JSON, has duplicate keys, or is over a limit.

    `finite`: also for NaN and Infinity, which are not JSON; the config of some models has them.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    check(value, finite=finite)
    return value


def parse_json_object(text: str | bytes, *, finite: bool = True) -> dict[str, Any]:
    """Return the object of a JSON text; raise ValueError as `parse_json` does, and for another value."""
    value = parse_json(text, finite=finite)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def check(value: Any, *, finite: bool = True) -> None:
    """Raise ValueError if a value is over a limit, or holds anything else than JSON has."""
    level, count = [value], 0
    for depth in range(MAX_DEPTH + 2):
        if not level:
            return
        count += len(level)
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        level = [inner for one in level for inner in _inside(one, finite)]


def _inside(value: Any, finite: bool) -> list[Any]:
    """Return the values in a list or mapping; raise ValueError for a value that is not allowed."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"a number has {len(str(value))} digits; integers are at most 2^64")
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ValueError("a number is not finite")
    elif value is not None:
        raise ValueError(f"a value is a {type(value).__name__}")
    return []


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"duplicate key '{twice[:100]}'")
    return found
