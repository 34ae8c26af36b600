"""Compare what the engine reports about itself with what the client measured."""

from __future__ import annotations

from collections.abc import Sequence

from powerband import metrics
from powerband.bench.monitor import Monitor
from powerband.core.engine import counter_increase
from powerband.core.measurement import CrossCheck
from powerband.core.records import Records
from powerband.load.prompts import Traffic

_MIN_IDLE_REQUESTS = 5


def crosschecks(
    records: Records, monitor: Monitor, samples: list[int], started_ns: int, *, at_end: bool
) -> list[CrossCheck]:
    """Compare client and engine between the first and the last of these samples of the engine's counters."""
    if len(samples) < 2:
        return []
    first, last = monitor.gauges[samples[0]], monitor.gauges[samples[-1]]
    begin, end = monitor.at_ns[samples[0]] - started_ns, monitor.at_ns[samples[-1]] - started_ns
    found = []
    if first.output_tokens is not None and last.output_tokens is not None:
        if at_end:
            rows = zip(metrics.tokens(records), records["end"], strict=True)
            received = float(sum(count for count, ended in rows if begin <= ended < end))
        else:
            received = _tokens_between(records, begin, end)
        found.append(CrossCheck(what="output tokens", client=received, engine=last.output_tokens - first.output_tokens))
    if first.ttft_count is not None and last.ttft_count is not None and last.ttft_count > first.ttft_count:
        rows_inside = [row for row, first_ns in enumerate(records["first"]) if begin <= first_ns < end]
        total = (last.ttft_total_s or 0) - (first.ttft_total_s or 0)
        mean = total / (last.ttft_count - first.ttft_count)
        what = "mean TTFT in s, from the response header"
        found.append(CrossCheck(what=what, client=_mean_ttft_s(records, rows_inside), engine=mean))
    idle = [row for row in _sent_to_idle_engine(records) if records["engine_us"][row]]
    if len(idle) >= _MIN_IDLE_REQUESTS:
        mean = sum(records["engine_us"][row] for row in idle) / 1e6 / len(idle)
        what = "mean TTFT in s, from the response header, of requests sent to an idle engine"
        found.append(CrossCheck(what=what, client=_mean_ttft_s(records, idle), engine=mean))
    return found


def cacheable_share(traffic: Traffic, records: Records) -> float:
    """Return the share of prompt tokens that a prefix cache may hold: shared prefixes and the chat template."""
    firsts = [row for row, number in enumerate(records["number"]) if number % traffic.turns == 0]
    reported = sum(records["prompt"][row] for row in firsts)
    prepared = sum(traffic.prompt_tokens[records["number"][row] // traffic.turns] for row in firsts)
    template = max(0, reported - prepared) / reported if reported else 0.0
    return template + (1 - template) * traffic.prefix_share


def _mean_ttft_s(records: Records, rows: Sequence[int]) -> float:
    """Return the mean time from the response header to the first content event.

    vLLM and llama.cpp send the header when they accept a request, before queueing and prefill; their TTFT starts there.
    """
    return sum(records["first"][row] - records["head"][row] for row in rows) / 1e9 / max(1, len(rows))


def _sent_to_idle_engine(records: Records) -> list[int]:
    """Return the complete requests that were sent while no other request was in flight."""
    order = sorted(range(len(records)), key=records["sent"].__getitem__)
    found, busy_until = [], 0
    for row, complete in (
        (row, complete) for complete, row in zip(records.select(order).complete(), order, strict=True)
    ):
        if complete and records["sent"][row] >= busy_until:
            found.append(row)
        busy_until = max(busy_until, records["end"][row])
    return found


def _tokens_between(records: Records, begin: int, end: int) -> float:
    """Return the number of tokens received in a time span; a chunk may hold several tokens."""
    total = 0.0
    counts = metrics.tokens(records)
    for row in range(len(records)):
        first, chunks = records["first"][row], records["chunks"][row]
        if not chunks or first >= end or records["end"][row] < begin:
            continue
        per_chunk = counts[row] / chunks
        if first >= begin and records["end"][row] < end:
            total += counts[row]
            continue
        at_ns, chunks_inside = first, int(begin <= first)
        for gap in records.gaps_of(row):
            at_ns += gap * 1000
            chunks_inside += begin <= at_ns < end
        total += chunks_inside * per_chunk
    return total


def engine_figures(monitor: Monitor, samples: list[int], traffic: Traffic) -> dict[str, float]:
    """Return the engine's gauges over the window, and its counters over the whole run."""
    figures = {"workload_prefix_share": traffic.prefix_share}
    if not samples:
        return figures
    inside = [monitor.gauges[index] for index in samples]
    for name in ("queue_depth", "running", "kv_use"):
        values = [value for gauges in inside if (value := getattr(gauges, name)) is not None]
        if values:
            figures[f"{name}_mean"], figures[f"{name}_max"] = sum(values) / len(values), max(values)
    if queries := counter_increase(monitor.gauges, "prefix_queries_tokens"):
        figures["prefix_hit_share"] = (counter_increase(monitor.gauges, "prefix_hits_tokens") or 0.0) / queries
    if drafted := counter_increase(monitor.gauges, "spec_drafted_tokens"):
        figures["spec_accepted_share"] = (counter_increase(monitor.gauges, "spec_accepted_tokens") or 0.0) / drafted
    if (preemptions := counter_increase(monitor.gauges, "preemptions")) is not None:
        figures["preemptions"] = preemptions
    return figures
