"""Metric definitions: unit, direction and meaning of every reported number."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from powerband.core.records import Records


@dataclass(frozen=True)
class Metric:
    """The definition of one reported number."""

    name: str
    unit: Literal["s", "tokens", "requests", "ratio", "events"]
    better: Literal["lower", "higher", "neither"]
    description: str


# Gauges are reported by the engine on its metrics endpoint; counters count from the engine's start.
GAUGES = {
    metric.name: metric
    for metric in (
        Metric("queue_depth", "requests", "lower", "requests waiting in the engine's queue"),
        Metric("running", "requests", "neither", "requests being processed"),
        Metric("kv_use", "ratio", "neither", "share of the KV cache in use by running requests"),
        Metric("prefix_queries_tokens", "tokens", "neither", "prompt tokens looked up in the prefix cache"),
        Metric("prefix_hits_tokens", "tokens", "higher", "prompt tokens found there and not computed again"),
        Metric("preemptions", "events", "lower", "requests evicted from the KV cache and recomputed later"),
        Metric("spec_drafted_tokens", "tokens", "neither", "draft tokens proposed by speculative decoding"),
        Metric("spec_accepted_tokens", "tokens", "higher", "draft tokens that the model accepted"),
        Metric("prompt_tokens", "tokens", "neither", "prompt tokens received, including cached ones"),
        Metric("output_tokens", "tokens", "higher", "output tokens generated"),
        Metric("refused_requests", "requests", "lower", "requests rejected because the queue was full"),
        Metric("ttft_total_s", "s", "neither", "sum of the times to first token, by the engine's clock"),
        Metric("ttft_count", "requests", "neither", "requests in that sum"),
    )
}

# Latencies are computed from request records. TTFT and E2E start at the *scheduled* send time, so that delay in the
# client or in a queue counts as waiting time.
LATENCIES = {
    metric.name: metric
    for metric in (
        Metric("ttft", "s", "lower", "time to first token: from the scheduled send time to the first content event"),
        Metric("itl", "s", "lower", "inter-token latency: gap between two content events, over all individual gaps"),
        Metric("tpot", "s", "lower", "time per output token after the first: (e2e - ttft) / (tokens - 1), per request"),
        Metric("e2e", "s", "lower", "end-to-end latency: from the scheduled send time to the last byte"),
    )
}


def ttft(records: Records) -> array[float]:
    """Return each request's time to first token, in seconds."""
    return array("d", ((first - due) / 1e9 for first, due in zip(records["first"], records["due"], strict=True)))


def e2e(records: Records) -> array[float]:
    """Return each request's end-to-end latency, in seconds."""
    return array("d", ((end - due) / 1e9 for end, due in zip(records["end"], records["due"], strict=True)))


def tpot(records: Records) -> array[float]:
    """Return each request's time per output token after the first, in seconds, for answers of two tokens or more."""
    rows = zip(records["first"], records["end"], tokens(records), strict=True)
    return array("d", ((end - first) / (count - 1) / 1e9 for first, end, count in rows if count > 1))


def send_lag(records: Records) -> array[float]:
    """Return by how many seconds the client sent each request late."""
    return array("d", ((sent - due) / 1e9 for sent, due in zip(records["sent"], records["due"], strict=True)))


def tokens(records: Records) -> array[int]:
    """Return each answer's output tokens as the server reports them, or its content events if it reports none."""
    rows = zip(records["output"], records["chunks"], strict=True)
    return array("I", (reported or chunks for reported, chunks in rows))


PER_REQUEST: dict[str, Callable[[Records], array[float]]] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
