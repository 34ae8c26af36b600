"""What a server did over the window: rates, means and shares from its readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from powerband.core.diagnosis import Observation
from powerband.core.slo import SLO
from powerband.diagnose import machine
from powerband.diagnose.collect import Reading, Readings
from powerband.engines import live
from powerband.engines.live import Histogram

_MIN_COUNT = 5.0  # events of a histogram, below which its percentiles are not shown


def observe(found: Readings, slo: SLO | None) -> Observation:
    """Return the observation of the readings so far."""
    window = _Window(found)
    facts: dict[str, Any] = {
        "engine": found.engine,
        "engine_version": _version(found),
        "model": found.model,
        "window_s": round(found.window_s, 2),
        "readings": len(found.readings),
        "settings": _settings(found),
        "logged": found.logged,
        **_traffic(window),
        **_batch(window, found),
        **_latency(window, slo),
        **_speculation(window),
        **(found.machine or machine.facts(found)),
    }
    facts |= _from_log_gauges(found, facts)
    facts |= _shares(facts)
    return Observation(**{key: value for key, value in facts.items() if value is not None})


class _Window:
    """Differences of counters and histograms between the first and the last reading."""

    def __init__(self, found: Readings) -> None:
        self.readings: Sequence[Reading] = found.readings
        self.seconds = found.window_s

    def increase(self, name: str) -> float | None:
        """Return the increase of a counter; a restart of the server counts from zero."""
        values = [one.page.counters[name] for one in self.readings if name in one.page.counters]
        if len(values) < 2:
            return None
        return sum(max(0.0, later - before) if later >= before else later for before, later in pairwise(values))

    def gauges(self, name: str) -> list[float]:
        """Return all readings of a gauge."""
        return [one.page.gauges[name] for one in self.readings if name in one.page.gauges]

    def histogram(self, name: str) -> Histogram | None:
        """Return what a histogram gained; None: nothing."""
        found = [one.page.histograms[name] for one in self.readings if name in one.page.histograms]
        if len(found) < 2 or found[-1].events <= found[0].events or found[0].bounds != found[-1].bounds:
            return None
        first, last = found[0], found[-1]
        counts = tuple(after - before for before, after in zip(first.counts, last.counts, strict=True))
        return Histogram(last.bounds, counts, last.total - first.total, last.events - first.events)

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram over the window, which is exact."""
        gained = self.histogram(name)
        return gained.total / gained.events if gained else None


def quantile(histogram: Histogram | None, share: float) -> float | None:
    """Return a quantile, interpolated within its bucket; beyond the last bound, that bound."""
    if histogram is None or histogram.events < _MIN_COUNT:
        return None
    wanted, below, low = share * histogram.events, 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        below, low = count, bound
    return low


def share_within(histogram: Histogram | None, limit: float) -> float | None:
    """Return the share of the events within a limit, interpolated within its bucket."""
    if histogram is None or histogram.events < _MIN_COUNT:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if bound >= limit:
            part = (limit - low) / (bound - low) if bound < float("inf") else 1.0
            return (below + (count - below) * part) / histogram.events
        below, low = count, bound
    return 1.0


def _version(found: Readings) -> str | None:
    reported = found.facts.get("version") or found.facts.get("build_info") or found.logged.get("version")
    return str(reported) if reported is not None else None


def _settings(found: Readings) -> dict[str, Any]:
    """Return the knobs that are known: defaults, then the metrics' labels, then the log, then the command line."""
    labels = dict(found.readings[-1].page.labels) if found.readings else {}
    return {**live.facts(found.engine).defaults, **labels, **found.settings}


def _traffic(window: _Window) -> dict[str, Any]:
    seconds = max(window.seconds, 1e-9)
    requests, output = window.increase("requests"), window.increase("output_tokens")
    computed, cached = window.increase("computed_tokens"), window.increase("cached_tokens")
    prompt = window.increase("prompt_tokens")
    if prompt is None and computed is not None:
        prompt = computed + (cached or 0.0)
    if computed is None:
        hits, queries = window.increase("prefix_hits"), window.increase("prefix_queries")
        if hits is not None and queries and prompt and queries <= 1.2 * prompt:  # else requests were counted again
            cached = hits / queries * prompt
            computed = prompt - cached
    if requests is None:
        requests = _ended_tasks(window)
    prompt_mean, output_mean = window.mean("prompt_length"), window.mean("output_length")
    if prompt_mean is None and requests and prompt:
        prompt_mean = prompt / requests
    if output_mean is None and requests and output:
        output_mean = output / requests
    live_output = _decoded(window)
    return {
        "requests": requests,
        "request_rate_per_s": requests / seconds if requests is not None else None,
        "rejected": window.increase("rejected"),
        "prompt_tokens": prompt_mean,
        "output_tokens": output_mean,
        "prompt_tokens_per_s": prompt / seconds if prompt is not None else None,
        "computed_tokens_per_s": computed / seconds if computed is not None else None,
        "output_tokens_per_s": (live_output if live_output is not None else output or 0.0) / seconds
        if live_output is not None or output is not None
        else None,
        "cached_share": cached / prompt if cached is not None and prompt else None,
        "longest_tokens": max(window.gauges("longest_tokens"), default=None),
    }


def _decoded(window: _Window) -> float | None:
    """Return the tokens that llama-server's slots generated between the readings."""
    total, seen = 0.0, False
    for before, after in pairwise(window.readings):
        if not before.slots or len(before.slots) != len(after.slots):
            continue
        seen = True
        for one, other in zip(before.slots, after.slots, strict=True):
            gained = other.decoded - (one.decoded if other.task == one.task else 0.0)
            total += max(0.0, gained)
    return total if seen else None


def _ended_tasks(window: _Window) -> float | None:
    """Return how many tasks of llama-server's slots ended, as far as the readings show them."""
    ended, seen = 0.0, False
    for before, after in pairwise(window.readings):
        for one, other in zip(before.slots, after.slots, strict=False):
            seen = True
            ended += one.busy and (other.task != one.task or not other.busy)
    return ended if seen else None


def _batch(window: _Window, found: Readings) -> dict[str, Any]:
    running, waiting, kv = (window.gauges(name) for name in ("running", "waiting", "kv_use"))
    deferred = window.gauges("waiting_deferred")
    slots = [one.slots for one in window.readings if one.slots]
    settings = _settings(found)
    facts: dict[str, Any] = {
        "running": _mean(running),
        "running_max": max(running, default=None),
        "waiting": _mean(waiting),
        "waiting_max": max(waiting, default=None),
        "waiting_share": _mean([float(value > 0) for value in waiting]),
        "deferred_max": max(deferred, default=None),
        "preemptions": window.increase("preemptions"),
        "step_tokens": window.mean("step_tokens"),
        "sequence_limit": settings.get("max_num_seqs"),
        "context_limit": settings.get("max_model_len") or found.facts.get("max_model_len"),
        "kv_tokens": found.logged.get("kv_tokens"),
        "adapters": _adapters(settings),
    }
    blocks, size = settings.get("num_gpu_blocks"), settings.get("block_size")
    if facts["kv_tokens"] is None and isinstance(blocks, int) and isinstance(size, int):
        facts["kv_tokens"] = blocks * size
    if found.engine == "llamacpp":
        facts |= _slot_facts(found, slots)
        if slots:
            unified = settings.get("kv_unified") is True or (
                "parallel" not in settings and len({slot.context for slot in slots[-1]}) == 1
            )
            capacity = slots[-1][0].context * (1 if unified else len(slots[-1]))
            kv = [sum(slot.used for slot in one if slot.busy) / max(capacity, 1.0) for one in slots]
            facts["kv_tokens"] = capacity
    facts["kv_use"], facts["kv_use_max"] = _mean(kv), max(kv, default=None)
    full = facts["waiting_share"] is not None and facts["waiting_share"] >= 0.5
    if facts["sequence_limit"] is None and full and (facts["kv_use_max"] or 0.0) < 0.7:
        facts["sequence_limit"] = facts["running_max"]  # the batch is full for no other reason
    return facts


def _adapters(settings: dict[str, Any]) -> float | None:
    names = [settings.get(f"{state}_lora_adapters") for state in ("running", "waiting")]
    listed = {name for text in names if isinstance(text, str) for name in text.split(",") if name}
    return float(len(listed)) if listed else None


def _slot_facts(found: Readings, slots: list[Any]) -> dict[str, Any]:
    """Return the limits of llama-server's slots: from /props and /slots, or else from the log."""
    reported = found.facts.get("default_generation_settings") or {}
    per_slot = slots[-1][0].context if slots else reported.get("n_ctx") or found.logged.get("context_per_slot")
    count = len(slots[-1]) if slots else found.facts.get("total_slots") or found.logged.get("slots")
    return {"sequence_limit": count, "context_limit": per_slot}


def _latency(window: _Window, slo: SLO | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("ttft", "itl"):
        gained = window.histogram(name)
        facts[f"{name}_s"] = window.mean(name)
        for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            facts[f"{name}_{label}_s"] = quantile(gained, share)
    facts |= {f"{name}_s": window.mean(name) for name in ("e2e", "queue", "prefill")}
    decode = window.mean("decode")
    if facts["prefill_s"] is not None and decode is not None:
        facts["prefill_share"] = facts["prefill_s"] / max(facts["prefill_s"] + decode, 1e-9)
    prefill_s, decode_s = window.increase("prefill_seconds"), window.increase("decode_seconds")
    if prefill_s is not None and decode_s is not None and prefill_s + decode_s > 0:
        facts["prefill_share"] = prefill_s / (prefill_s + decode_s)
    if slo is not None:
        limits = {metric: limit for metric, (_, limit) in slo.highest_bounds().items()}
        if "ttft" in limits:
            facts["slo_ttft_share"] = share_within(window.histogram("ttft"), limits["ttft"])
        if limit := limits.get("tpot", limits.get("itl")):
            facts["slo_tpot_share"] = share_within(window.histogram("itl"), limit)
    return facts


def _speculation(window: _Window) -> dict[str, Any]:
    drafts, drafted, accepted = (window.increase(name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    facts: dict[str, Any] = {"draft_tokens": drafted}
    if drafted and accepted is not None:
        facts["acceptance"] = accepted / drafted
        if drafts:
            facts |= {"tokens_per_step": 1 + accepted / drafts, "drafted_per_step": drafted / drafts}
    return facts


def _from_log_gauges(found: Readings, facts: dict[str, Any]) -> dict[str, Any]:
    """Return gauges of the log's periodic lines where the metrics could not be read."""
    lines = [one for one in found.log_gauges if one.get("running")] or found.log_gauges
    if not lines or facts.get("running") is not None:
        return {}

    def values(name: str) -> list[float]:
        return [one[name] for one in lines if name in one]

    waiting, kv, hits = values("waiting"), values("kv_use_percent"), values("hit_percent")
    output, preempted = _mean(values("output_tokens_per_s")), values("preemptions")
    found_facts: dict[str, Any] = {
        "running": _mean(values("running")),
        "running_max": max(values("running"), default=None),
        "waiting": _mean(waiting),
        "waiting_max": max(waiting, default=None),
        "waiting_share": _mean([float(one > 0) for one in waiting]),
        "kv_use": _scaled(_mean(kv)),
        "kv_use_max": _scaled(max(kv, default=None)),
        "cached_share": _scaled(_mean(hits)),
        "output_tokens_per_s": output,
        "computed_tokens_per_s": _mean(values("prompt_tokens_per_s")),
        "preemptions": sum(preempted) if preempted else None,
    }
    return {key: value for key, value in found_facts.items() if facts.get(key) is None}


def _shares(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what follows from several facts."""
    ratio = _ratios(facts)
    found: dict[str, Any] = {
        "queue_share": ratio("queue_s", "e2e_s"),
        "prefill_ttft_share": ratio("prefill_s", "ttft_s"),
        "preempted_share": ratio("preemptions", "requests"),
        "itl_spread": ratio("itl_p99_s", "itl_p50_s"),
        "context_use": ratio("longest_tokens", "context_limit"),
    }
    if facts.get("ttft_s") and facts.get("queue_s") is not None and facts.get("prefill_s") is not None:
        rest = facts["ttft_s"] - facts["queue_s"] - facts["prefill_s"]
        found["frontend_share"] = max(0.0, rest / facts["ttft_s"])
    if facts.get("kv_tokens") and facts.get("prompt_tokens") and facts.get("output_tokens"):
        found["kv_sequences"] = facts["kv_tokens"] / (facts["prompt_tokens"] + facts["output_tokens"])
    if facts.get("itl_s") is None and facts.get("running") and facts.get("output_tokens_per_s"):
        found["itl_s"] = facts["running"] / facts["output_tokens_per_s"]  # Little's law; includes prefill
    return {key: value for key, value in found.items() if value is not None}


def _ratios(facts: dict[str, Any]) -> Callable[[str, str], float | None]:
    def ratio(part: str, whole: str) -> float | None:
        if facts.get(part) is None or not facts.get(whole):
            return None
        return float(facts[part]) / float(facts[whole])

    return ratio


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _scaled(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
