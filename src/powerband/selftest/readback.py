"""Read back what an engine reports of its settings: in its log, its metrics, and the memory that it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from powerband.core.engine import Gauges

Verdict = Literal["read-back", "accepted", "ignored"]
_KV_TOLERANCE = 1.4  # a format of half the size would differ by a factor of 2
_OPTIONS_LINE = re.compile(r"non-default args: (.*)")
# What the engine's log says of a knob; the last match counts.
_REPORTED: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "max_num_batched_tokens": r"max_num_batched_tokens=(\d+)",
        "kv_cache_dtype": r"kv_cache_dtype=(\w+)",
        "tensor_parallel_size": r"tensor_parallel_size=(\d+)",
        "enforce_eager": r"enforce_eager=(\w+)",
        "dtype": r"dtype=torch\.(\w+)",
    },
    "llamacpp": {
        "parallel": r"n_slots = (\d+)",
        "cache_type_k": r"\bK \((\w+)\)",
        "cache_type_v": r"\bV \((\w+)\)",
        "batch_size": r"\bn_batch\s*= (\d+)",
        "ubatch_size": r"\bn_ubatch\s*= (\d+)",
    },
}


@dataclass(frozen=True)
class Evidence:
    """What is known of a running engine."""

    engine: str
    log: str
    gauges: Gauges
    devices: int  # on which its memory use has grown
    kv_ratio: float | None  # tokens in its KV cache over the predicted ones


def verdict(settings: Mapping[str, Any], evidence: Evidence) -> Verdict:
    """Return whether the engine reports these knobs; 'accepted': it reports nothing about any of them."""
    found = [one for knob, wanted in settings.items() for one in _verdicts(knob, wanted, evidence)]
    return "ignored" if False in found else "read-back" if found else "accepted"


def _verdicts(knob: str, wanted: Any, evidence: Evidence) -> list[bool]:
    """Return whether each piece of evidence confirms the knob."""
    found = []
    if (pattern := _REPORTED.get(evidence.engine, {}).get(knob)) and (said := re.findall(pattern, evidence.log)):
        found.append(_same(said[-1], wanted))
    if (options := _OPTIONS_LINE.search(evidence.log)) and knob.islower():
        found.append(_listed(knob, wanted, options[1]))
    if knob == "tensor_parallel_size":
        found.append(evidence.devices == wanted)
    if knob == "kv_cache_dtype" and evidence.kv_ratio is not None:
        found.append(1 / _KV_TOLERANCE < evidence.kv_ratio < _KV_TOLERANCE)
    if knob in ("speculative_config", "spec_type") and evidence.gauges.spec_drafted_tokens:
        found.append(True)
    return found


def _listed(knob: str, wanted: Any, options: str) -> bool:
    """Return whether the line with all options that are not at their defaults has this knob and value."""
    if isinstance(wanted, Mapping):
        group = re.search(rf"'{knob}': \{{([^}}]*)\}}", options)
        return group is not None and all(_listed(part, value, group[1]) for part, value in wanted.items())
    found = re.search(rf"'{knob}': '?([^,'}}]+)", options)
    return found is not None and _same(found[1], wanted)


def _same(said: str, wanted: Any) -> bool:
    return said.casefold().startswith(str(wanted).casefold())
