"""Set what the engine says of itself beside what the client saw."""

from __future__ import annotations

from collections.abc import Sequence

from powerband import metrics
from powerband.bench.monitor import Monitor
from powerband.core.engine import grown
from powerband.core.measurement import CrossCheck
from powerband.core.records import Records
from powerband.load.prompts import Traffic

_LEAST_ALONE = 5


def crosschecks(
    records: Records, watch: Monitor, places: list[int], started_ns: int, *, at_end: bool
) -> list[CrossCheck]:
    """Set the client's word beside the engine's, between two readings of the engine's counters."""
    if len(places) < 2:
        return []
    first, last = watch.gauges[places[0]], watch.gauges[places[-1]]
    begin, end = watch.at_ns[places[0]] - started_ns, watch.at_ns[places[-1]] - started_ns
    found = []
    if first.output_tokens is not None and last.output_tokens is not None:
        if at_end:
            ended = zip(metrics.tokens(records), records["end"], strict=True)
            seen = float(sum(count for count, when in ended if begin <= when < end))
        else:
            seen = _tokens_between(records, begin, end)
        found.append(CrossCheck(what="output tokens", client=seen, engine=last.output_tokens - first.output_tokens))
    if first.ttft_count is not None and last.ttft_count is not None and last.ttft_count > first.ttft_count:
        spoke = [row for row, when in enumerate(records["first"]) if begin <= when < end]
        total = (last.ttft_total_s or 0) - (first.ttft_total_s or 0)
        mean = total / (last.ttft_count - first.ttft_count)
        what = "mean TTFT in s, from the answer's head"
        found.append(CrossCheck(what=what, client=_waited(records, spoke), engine=mean))
    alone = [row for row in _alone(records) if records["engine_us"][row]]
    if len(alone) >= _LEAST_ALONE:
        mean = sum(records["engine_us"][row] for row in alone) / 1e6 / len(alone)
        what = "mean TTFT in s, from the answer's head, of requests that met an idle engine"
        found.append(CrossCheck(what=what, client=_waited(records, alone), engine=mean))
    return found


def known_share(traffic: Traffic, records: Records) -> float:
    """Return which part of the prompt tokens a cache may know: the workload's shared ones, and the chat template's."""
    firsts = [row for row, number in enumerate(records["number"]) if number % traffic.turns == 0]
    told = sum(records["prompt"][row] for row in firsts)
    ours = sum(traffic.prompt_tokens[records["number"][row] // traffic.turns] for row in firsts)
    template = max(0, told - ours) / told if told else 0.0
    return template + (1 - template) * traffic.prefix_share


def _waited(records: Records, rows: Sequence[int]) -> float:
    """Return the mean time from the answer's head to the first content.

    Both engines send the head when they take a request up, before it waits or is computed; their own clocks start then.
    """
    return sum(records["first"][row] - records["head"][row] for row in rows) / 1e9 / max(1, len(rows))


def _alone(records: Records) -> list[int]:
    """Return the complete requests that were sent while no other was in flight."""
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
    """Count the tokens whose content came within a span, several per chunk where the server says so."""
    total = 0.0
    counts = metrics.tokens(records)
    for row in range(len(records)):
        first, chunks = records["first"][row], records["chunks"][row]
        if not chunks or first >= end or records["end"][row] < begin:
            continue
        each = counts[row] / chunks
        if first >= begin and records["end"][row] < end:
            total += counts[row]
            continue
        moment, seen = first, int(begin <= first)
        for gap in records.gaps_of(row):
            moment += gap * 1000
            seen += begin <= moment < end
        total += seen * each
    return total


def engine_figures(watch: Monitor, places: list[int], traffic: Traffic) -> dict[str, float]:
    """Return what the engine's gauges say of the window, and of the whole run where they count."""
    figures = {"workload_prefix_share": traffic.prefix_share}
    if not places:
        return figures
    inside = [watch.gauges[place] for place in places]
    for name in ("queue_depth", "running", "kv_use"):
        values = [value for gauges in inside if (value := getattr(gauges, name)) is not None]
        if values:
            figures[f"{name}_mean"], figures[f"{name}_max"] = sum(values) / len(values), max(values)
    if queries := grown(watch.gauges, "prefix_queries_tokens"):
        figures["prefix_hit_share"] = (grown(watch.gauges, "prefix_hits_tokens") or 0.0) / queries
    if drafted := grown(watch.gauges, "spec_drafted_tokens"):
        figures["spec_accepted_share"] = (grown(watch.gauges, "spec_accepted_tokens") or 0.0) / drafted
    if (preemptions := grown(watch.gauges, "preemptions")) is not None:
        figures["preemptions"] = preemptions
    return figures
