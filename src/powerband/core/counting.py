"""Sort and count tens of millions of gaps: compiled where that was possible, plain Python otherwise."""

from __future__ import annotations

from array import array
from typing import Any

_compiled: Any
try:
    from powerband.core import _counting as _compiled
except ImportError:  # no compiler, when this was installed
    _compiled = None


def sort_u32(values: array[int]) -> None:
    """Sort in place."""
    if _compiled:
        _compiled.sort_u32(values)
    else:
        values[:] = array("I", sorted(values))


def count_above(values: array[int], ends: array[int], bound: int) -> list[int]:
    """Return how many values of each lump lie above the bound."""
    if _compiled:
        return list(_compiled.count_above(values, ends, bound))
    begins = [0, *ends[:-1]]
    return [sum(value > bound for value in values[begin:end]) for begin, end in zip(begins, ends, strict=True)]
