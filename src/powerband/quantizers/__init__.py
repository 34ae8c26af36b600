"""Quantizers, one per module; the module's name is the quantizer's name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from powerband.errors import InputError, did_you_mean
from powerband.quantizers.base import Quantizer, partial_path

__all__ = ["Quantizer", "for_scheme", "get", "names", "partial_path", "schemes"]
_NOT_QUANTIZERS = frozenset({"base", "compress_job"})


@cache
def names() -> tuple[str, ...]:
    """Return the names of all quantizers."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_QUANTIZERS))


@cache
def get(name: str) -> Quantizer:
    """Return the quantizer with a name."""
    quantizer: Quantizer = importlib.import_module(f"{__name__}.{name}").QUANTIZER
    return quantizer


def schemes() -> tuple[str, ...]:
    """Return the schemes that some quantizer creates."""
    return tuple(scheme for name in names() for scheme in get(name).schemes)


def for_scheme(scheme: str) -> Quantizer:
    """Return the quantizer that creates a scheme; raise if there is none."""
    for name in names():
        if scheme in get(name).schemes:
            return get(name)
    raise InputError(
        f"no quantizer creates the scheme '{scheme}'.{did_you_mean(scheme, schemes())}",
        hint=f"use one of: {', '.join(schemes())}",
    )
