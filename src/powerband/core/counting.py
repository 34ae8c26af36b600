"""Sort and count tens of millions of gaps: compiled if a C compiler was available, otherwise in Python."""

from __future__ import annotations

from array import array
from typing import Any

_compiled: Any
try:
    from powerband.core import _counting as _compiled
except ImportError:  # no C compiler at install time
    _compiled = None


def sort_u32(values: array[int]) -> None:
    """Sort the array in place."""
    if _compiled:
        _compiled.sort_u32(values)
    else:
        values[:] = array("I", sorted(values))


def count_above(values: array[int], ends: array[int], bound: int) -> list[int]:
    """Return the number of values above the bound in each batch; `ends` holds the end index of each batch."""
    if _compiled:
        return list(_compiled.count_above(values, ends, bound))
    begins = [0, *ends[:-1]]
    return [sum(value > bound for value in values[begin:end]) for begin, end in zip(begins, ends, strict=True)]
