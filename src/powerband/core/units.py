"""Durations and sizes: written with units in files, seconds and bytes in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, WithJsonSchema

_SECONDS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+)\s*$")


def _quantity(text: str, units: Mapping[str, Decimal | int], example: str) -> Decimal:
    match = _QUANTITY.match(text)
    if match is None or match[2] not in units:
        raise ValueError(f"'{text}' has no known unit; write it like {example} (units: {', '.join(units)})")
    return Decimal(match[1]) * units[match[2]]


def parse_seconds(value: object) -> object:
    """Convert '250ms' to 0.25; return numbers unchanged."""
    return float(_quantity(value, _SECONDS, "250ms")) if isinstance(value, str) else value


def parse_bytes(value: object) -> object:
    """Convert '80GiB' to 85899345920; return numbers unchanged."""
    if not isinstance(value, str):
        return value
    size = _quantity(value, _BYTES, "80GiB")
    if size != size.to_integral_value():
        raise ValueError(f"'{value}' is not a whole number of bytes")
    return int(size)


def format_seconds(value: float) -> str:
    """Format a duration so that `parse_seconds` returns exactly the same float."""
    exact = Decimal(repr(value))
    unit = "us" if 0 < value < 0.001 else "ms" if 0 < value < 1 else "s"
    return f"{(exact / _SECONDS[unit]).normalize():f}{unit}"


def format_bytes(value: int) -> str:
    """Format a size in the largest binary unit that divides it exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTES[unit] == 0:
            return f"{value // _BYTES[unit]}{unit}"
    return f"{value}B"


def about_bytes(value: float) -> str:
    """Format a size for display, rounded."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value >= _BYTES[unit]:
            return f"{value / _BYTES[unit]:.1f} {unit}"
    return f"{value:.0f} B"


def about_duration(seconds: float) -> str:
    """Format a duration for display, rounded: '100 s', '2.5 min', '12 min', '2.5 h'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.2g} min" if seconds < 5940 else f"{seconds / 3600:.2g} h"


def _with_units(info: SerializationInfo) -> bool:
    return bool(info.context and info.context.get("units"))


def _dump_seconds(value: float, info: SerializationInfo) -> float | str:
    return format_seconds(value) if _with_units(info) else value


def _dump_bytes(value: int, info: SerializationInfo) -> int | str:
    return format_bytes(value) if _with_units(info) else value


def _schema(kind: str, example: str, units: Mapping[str, object]) -> WithJsonSchema:
    pattern = rf"^[0-9.]+\s*({'|'.join(units)})$"
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "string", "pattern": pattern, "examples": [example]}]})


Seconds = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(parse_seconds),
    PlainSerializer(_dump_seconds),
    _schema("number", "250ms", _SECONDS),
]
Bytes = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(parse_bytes),
    PlainSerializer(_dump_bytes),
    _schema("integer", "80GiB", _BYTES),
]
