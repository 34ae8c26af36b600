"""What the numbers mean: every metric's unit, direction and definition, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One number that Powerband reports."""

    name: str
    unit: Literal["s", "tokens", "requests", "ratio", "events"]
    better: Literal["lower", "higher", "neither"]
    means: str


# Gauges are the engine's own word, read from its pages; counters run from the engine's start.
GAUGES = {
    metric.name: metric
    for metric in (
        Metric("queue_depth", "requests", "lower", "requests that wait for a place"),
        Metric("running", "requests", "neither", "requests that are being worked on"),
        Metric("kv_use", "ratio", "neither", "part of the KV cache that running requests hold"),
        Metric("prefix_queries_tokens", "tokens", "neither", "prompt tokens looked up in the prefix cache"),
        Metric("prefix_hits_tokens", "tokens", "higher", "prompt tokens found there and not computed"),
        Metric("preemptions", "events", "lower", "requests thrown out of the KV cache to be computed again"),
        Metric("spec_drafted_tokens", "tokens", "neither", "tokens proposed by speculation"),
        Metric("spec_accepted_tokens", "tokens", "higher", "proposed tokens that the model accepted"),
        Metric("prompt_tokens", "tokens", "neither", "prompt tokens taken in, cached ones included"),
        Metric("output_tokens", "tokens", "higher", "tokens generated"),
        Metric("refused_requests", "requests", "lower", "requests turned away by a queue bound"),
    )
}
