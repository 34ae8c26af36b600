"""The quantization schemes of the catalogue, and where engines support them."""

from __future__ import annotations

from functools import cache

from powerband import catalog
from powerband.core.model import Model
from powerband.core.scheme import Scheme
from powerband.core.support import Support
from powerband.errors import InputError
from powerband.store import documents


@cache
def all_schemes() -> tuple[Scheme, ...]:
    """Return the catalogue's schemes."""
    return tuple(scheme(name) for name in catalog.names("scheme"))


@cache
def scheme(name: str) -> Scheme:
    """Return a scheme of the catalogue."""
    found = documents.parse(catalog.text("scheme", name), source=name)
    assert isinstance(found, Scheme)
    return found


def published_scheme(model: Model) -> Scheme:
    """Return the scheme of a model's published weights."""
    for one in all_schemes():
        if model.weight_format in one.published_as and one.format == (model.format or "safetensors"):
            return one
    raise InputError(
        f"{model.source} is published in '{model.weight_format}', which is not a quantization scheme of the catalogue",
        hint=f"schemes: {', '.join(catalog.names('scheme'))}",
    )


@cache
def support(engine: str) -> Support | None:
    """Return what an engine's documentation says of weights and KV caches; None: the catalogue does not know it."""
    if engine not in catalog.names("support"):
        return None
    found = documents.parse(catalog.text("support", engine), source=engine)
    assert isinstance(found, Support)
    return found
