"""What is documented against a deployment's weights and KV cache on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from powerband.core.deployment import Deployment
from powerband.core.engine import Problem
from powerband.core.family import LABELS, families_of
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.support import Fact, Level
from powerband.engines.base import Engine
from powerband.errors import InputError
from powerband.store import schemes

_WORDS: dict[Level, str] = {
    "no": "does not support",
    "slow": "computes on the CPU with",
    "emulated": "emulates, slower than 16 bits,",
}


def problems(
    engine: Engine[Any], deployment: Deployment[Any], *, model: Model, host: Host, version: str
) -> Iterator[Problem]:
    """Yield a problem for weights or a KV format that the engine does not run well on a device of the host."""
    table = schemes.support(engine.name)
    if table is None or not engine.reads_weights:
        return
    scheme = deployment.variant.scheme or _published(model)
    kv_format = engine.settings_of(deployment, model=model, host=host).kv_format
    for family in sorted(one for one in families_of(host) if one):
        for what, fact in (
            (f"{scheme} weights", table.of_weights(scheme, family, version, experts=bool(model.experts))),
            (f"a KV cache in {kv_format}", table.of_kv(kv_format, family, version)),
        ):
            if fact and fact.level in _WORDS:
                yield _problem(f"{engine.name} {_WORDS[fact.level]} {what} on {LABELS[family]}", fact)


def _problem(sentence: str, fact: Fact) -> Problem:
    note = f" ({fact.note})" if fact.note else ""
    return Problem(
        rule="support",
        sentence=f"{sentence}{note}; source: {fact.source.url}, {fact.source.as_of}",
        hint="choose another scheme or KV format; if it works with your version, --force starts it",
        severity="refuse" if fact.level == "no" else "warn",
    )


def _published(model: Model) -> str:
    try:
        return schemes.published_scheme(model).name or ""
    except InputError:
        return ""
