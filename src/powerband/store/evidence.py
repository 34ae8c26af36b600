"""Measured quality: the catalogue's published records, and those of evaluations on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from powerband import catalog
from powerband.core.evaluation import Evaluation
from powerband.core.evidence import Evidence, QualityRecord, Unit
from powerband.errors import PowerbandError
from powerband.store import documents, runs

EVALUATIONS, RECORD = "evaluations", "evidence"  # the folder of cached evaluations, and the key of their provenance
LOSSLESS = frozenset({"bf16", "f16", "auto", ""})  # schemes and KV formats without quantization
_UNITS: dict[str, Unit] = {"kl_mean": "mean-kl", "top1_agreement": "same-top", "perplexity_ratio": "ppl-ratio"}


@dataclass(frozen=True)
class Sourced:
    """A record, and where it was read."""

    record: QualityRecord
    scheme: str  # of the weights; empty: not quantized
    kv_format: str  # of the KV cache; empty: not quantized
    source: str
    here: bool = False  # measured on this machine


@cache
def published() -> tuple[Sourced, ...]:
    """Return the records of the catalogue."""
    found = []
    for name in catalog.names("evidence"):
        document = documents.parse(catalog.text("evidence", name), source=name)
        assert isinstance(document, Evidence)
        for one in document.records:
            source = document.sources[one.source]
            found.append(Sourced(one, document.scheme, document.kv_format, f"{source.url}, {source.as_of}"))
    return tuple(found)


def measured_here() -> list[Sourced]:
    """Return the records of evaluations on this machine, the newest of each configuration and figure."""
    found: dict[tuple[Any, ...], Sourced] = {}
    folder = runs.state_root() / EVALUATIONS
    for path in sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime) if folder.is_dir() else []:
        try:
            evaluation = documents.read_as(Evaluation, path)
        except PowerbandError:  # of another version
            continue
        for one in _records(evaluation):
            record = one.record
            key = (record.model, one.scheme, one.kv_format, record.engine, record.engine_version, record.unit)
            found[key] = one
    return list(found.values())


def _records(evaluation: Evaluation) -> Iterator[Sourced]:
    facts = dict(evaluation.provenance.get(RECORD) or {})
    if not facts:
        return
    scheme, kv_format = facts.pop("scheme"), facts.pop("kv_format")
    source = f"evaluated here with {facts['engine']} {facts['engine_version']}"
    for figure in evaluation.figures:
        if figure.name in _UNITS and not figure.kind:
            value = figure.found
            measured = {"unit": _UNITS[figure.name], "value": value.value, "low": value.low, "high": value.high}
            record = QualityRecord.model_validate({**facts, "task": "text", "benchmark": "evaluate", **measured})
            yield Sourced(record, scheme, kv_format, source, here=True)
