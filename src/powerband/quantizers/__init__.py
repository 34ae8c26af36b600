"""One way to make variants per file; the file name is the registry."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from powerband.errors import InputError, did_you_mean
from powerband.quantizers.base import Quantizer, partial

__all__ = ["Quantizer", "get", "names", "partial", "schemes", "that_makes"]
_MACHINERY = frozenset({"base", "compress_job"})


@cache
def names() -> tuple[str, ...]:
    """Return the quantizers that this package knows."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _MACHINERY))


@cache
def get(name: str) -> Quantizer:
    """Return the quantizer of that name."""
    quantizer: Quantizer = importlib.import_module(f"{__name__}.{name}").QUANTIZER
    return quantizer


def schemes() -> tuple[str, ...]:
    """Return the schemes that can be made."""
    return tuple(scheme for name in names() for scheme in get(name).schemes)


def that_makes(scheme: str) -> Quantizer:
    """Return the quantizer for a scheme."""
    for name in names():
        if scheme in get(name).schemes:
            return get(name)
    raise InputError(
        f"nothing here makes '{scheme}'.{did_you_mean(scheme, schemes())}", hint=f"schemes: {', '.join(schemes())}"
    )
