"""What the numbers mean: every metric's unit, direction and definition, in one table."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from powerband.core.records import Records


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
        Metric("ttft_total_s", "s", "neither", "times to first token by the engine's own clock, added up"),
        Metric("ttft_count", "requests", "neither", "requests in that sum"),
    )
}

# Latencies are read off request records. Each begins at the *scheduled* time: what a late client or a full queue adds
# is part of what a user waits.
LATENCIES = {
    metric.name: metric
    for metric in (
        Metric("ttft", "s", "lower", "time to first token: from the scheduled send time to the first content"),
        Metric("itl", "s", "lower", "gap between two contents, over all individual gaps"),
        Metric("tpot", "s", "lower", "time per output token after the first: (e2e - ttft) / (tokens - 1), per request"),
        Metric("e2e", "s", "lower", "whole answer: from the scheduled send time to the last byte"),
    )
}


def ttft(records: Records) -> array[float]:
    """Return each request's time to first token."""
    return array("d", ((first - due) / 1e9 for first, due in zip(records["first"], records["due"], strict=True)))


def e2e(records: Records) -> array[float]:
    """Return each request's time to the end of its answer."""
    return array("d", ((end - due) / 1e9 for end, due in zip(records["end"], records["due"], strict=True)))


def tpot(records: Records) -> array[float]:
    """Return each request's time per output token; tokens by the server's count, not by chunks."""
    rows = zip(records["first"], records["end"], tokens(records), strict=True)
    return array("d", ((end - first) / (count - 1) / 1e9 for first, end, count in rows if count > 1))


def send_lag(records: Records) -> array[float]:
    """Return how late our own client sent each request."""
    return array("d", ((sent - due) / 1e9 for sent, due in zip(records["sent"], records["due"], strict=True)))


def tokens(records: Records) -> array[int]:
    """Return each answer's tokens by the server's word, or its chunks where the server says nothing."""
    return array("I", (told or seen for told, seen in zip(records["output"], records["chunks"], strict=True)))


PER_REQUEST: dict[str, Callable[[Records], array[float]]] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
