"""Prometheus metrics of the fleet, and the summary for the supervisor."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from powerband.core.fleet import PRIORITIES
from powerband.serve.router.capture import TrafficCapture
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler

_PER_DECADE = 16  # keeps the error of a quantile estimated from the buckets at a few per cent
_BUCKETS = tuple(round(10 ** (step / _PER_DECADE), 5) for step in range(-2 * _PER_DECADE, 2 * _PER_DECADE + 5))
_TPOT_BUCKETS = tuple(round(10 ** (step / _PER_DECADE), 6) for step in range(-3 * _PER_DECADE, 1))
_PROMPT_LENGTHS = (256, 1024, 4096, 16384)  # tokens; values of the label `prompt`
_RECENT = 200  # TTFTs kept per recipe
_ENGINE_METRICS = {  # engine gauge: metric name, whether it is a counter, help text
    "running": ("powerband_engine_running", False, "requests that the engine computes"),
    "queue_depth": ("powerband_engine_queue_depth", False, "requests in the engine's own queue"),
    "kv_use": ("powerband_kv_use", False, "fraction of the KV cache in use"),
    "prefix_queries_tokens": ("powerband_prefix_queries_tokens", True, "prompt tokens looked up in the prefix cache"),
    "prefix_hits_tokens": ("powerband_prefix_hits_tokens", True, "prompt tokens found in the prefix cache"),
    "preemptions": ("powerband_preemptions", True, "requests preempted for lack of KV cache"),
    "spec_drafted_tokens": ("powerband_spec_drafted_tokens", True, "tokens drafted by speculative decoding"),
    "spec_accepted_tokens": ("powerband_spec_accepted_tokens", True, "drafted tokens that were accepted"),
}

_SCALING_METRICS = {
    "replicas": "replicas that the autoscaler asks for",
    "fixed": "the best fixed number of replicas so far, by the autoscaler's ledger",
    "relative_cost": "cost of what the autoscaler follows, as a share of that of the best fixed number",
    "trusted": "0 if the request counts are stale or the clock jumped: the number is held",
}


class _Series(NamedTuple):
    """The series of a request's labels."""

    queue: Histogram
    ttft: Histogram
    tpot: Histogram
    e2e: Histogram
    output_tokens: Counter
    prompt_tokens: Counter


class Telemetry:
    """Metrics of one picker process; `capture_path` names the file that records its traffic, if any."""

    def __init__(self, capture_path: Path | None = None) -> None:
        self.capture = TrafficCapture(capture_path) if capture_path else None
        self.registry = CollectorRegistry()
        labels = ["model", "recipe", "class", "prompt"]

        def histogram(name: str, help_text: str, buckets: tuple[float, ...] = _BUCKETS) -> Histogram:
            return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)

        self.queue = histogram("powerband_queue_seconds", "time from arrival to dispatch")
        self.ttft = histogram("powerband_ttft_seconds", "time from arrival to the first token")
        self.tpot = histogram("powerband_tpot_seconds", "mean time between output tokens of a request", _TPOT_BUCKETS)
        self.e2e = histogram("powerband_e2e_seconds", "time from arrival to the end of the response")
        self.output_tokens = Counter("powerband_output_tokens", "output tokens", ["model"], registry=self.registry)
        self.prompt_tokens = Counter("powerband_prompt_tokens", "prompt tokens", ["model"], registry=self.registry)
        self.ttft_late = Counter(
            "powerband_ttft_late",
            "requests with a first token, by whether TTFT exceeded the SLO",
            ["model", "late"],
            registry=self.registry,
        )
        self.rejections = Counter(
            "powerband_refusals", "requests rejected, by error code", ["code"], registry=self.registry
        )
        self.overflows = Gauge("powerband_overflows", "requests served by the fallback model", registry=self.registry)
        self.retries = Counter(
            "powerband_retries",
            "requests asked of another replica before their first token, by what the first one did",
            ["reason"],
            registry=self.registry,
        )
        self.depth = Gauge("powerband_queue_depth", "queued requests", ["model"], registry=self.registry)
        self.running = Gauge("powerband_running", "requests in flight", ["model", "replica"], registry=self.registry)
        self.ready = Gauge("powerband_replicas_ready", "ready replicas", ["model"], registry=self.registry)
        self.cost = Gauge(
            "powerband_tenant_usd", "cost of a tenant's prompt and output tokens", ["tenant"], registry=self.registry
        )
        self.tenants_invalid = Gauge(
            "powerband_tenants_file_invalid", "1 if the tenants file could not be loaded", registry=self.registry
        )
        self.capture_lost = Gauge(
            "powerband_capture_lost", "requests that could not be written to the capture file", registry=self.registry
        )
        self.registry.register(self)
        self.replica_status: Mapping[str, Any] = {}  # the supervisor's last message about the replicas
        self.done = 0
        self.late = Counts[str]()  # first tokens after the limit of the SLO, by model
        self._series: dict[tuple[str, str, str, str], _Series] = {}
        self.by_recipe: dict[str, dict[str, Any]] = {}

    def count_rejection(self, error: RequestRejected) -> None:
        """Count a request that the picker rejected."""
        self.rejections.labels(error.code).inc()

    def count_retry(self, recipe: str, reason: str) -> None:
        """Count a request whose replica failed before its first token."""
        self.retries.labels(reason).inc()
        self._count(recipe, failed=True)

    def _count(self, recipe: str, *, failed: bool) -> dict[str, Any]:
        """Count a request of a recipe; return the counts of that recipe."""
        counts = self.by_recipe.setdefault(
            recipe, {"done": 0, "failed": 0, "first_tokens": 0, "ttft_s": deque(maxlen=_RECENT)}
        )
        counts["done"] += 1
        counts["failed"] += failed
        return counts

    def observe(self, context: RequestContext, outcome: RequestOutcome) -> None:
        """Record a request that a replica finished."""
        model, queued = context.model, context.queued
        recipe = queued.endpoint.recipe if queued.endpoint else ""
        bucket = bisect_left(_PROMPT_LENGTHS, queued.profile.prompt_tokens)
        length = f"<={_PROMPT_LENGTHS[bucket]}" if bucket < len(_PROMPT_LENGTHS) else f">{_PROMPT_LENGTHS[-1]}"
        labels = (model.name, recipe, PRIORITIES[queued.profile.priority], length)
        self.done += 1
        if self.capture:
            self.capture.add(context, outcome)
        counts = self._count(recipe, failed=outcome.status >= 500 or outcome.broken)
        series = self._series.get(labels) or self._bind(labels)
        series.queue.observe(queued.started_s - queued.arrived_s)
        if outcome.ttft_s is not None:
            counts["first_tokens"] += 1
            counts["ttft_s"].append(round(outcome.ttft_s, 4))
            series.ttft.observe(outcome.ttft_s)
            if model.ttft_s is not None:
                self.late[model.name] += outcome.ttft_s > model.ttft_s
                self.ttft_late.labels(model.name, "yes" if outcome.ttft_s > model.ttft_s else "no").inc()
            if outcome.tpot_s is not None:
                series.tpot.observe(outcome.tpot_s)
        if outcome.e2e_s is not None:
            series.e2e.observe(outcome.e2e_s)
        series.output_tokens.inc(outcome.output_tokens)
        series.prompt_tokens.inc(outcome.prompt_tokens or queued.profile.prompt_tokens)

    def _bind(self, labels: tuple[str, str, str, str]) -> _Series:
        """Look the series of these labels up once: for each request it would cost a tenth of the picker's time."""
        found = self._series[labels] = _Series(
            queue=self.queue.labels(*labels),
            ttft=self.ttft.labels(*labels),
            tpot=self.tpot.labels(*labels),
            e2e=self.e2e.labels(*labels),
            output_tokens=self.output_tokens.labels(labels[0]),
            prompt_tokens=self.prompt_tokens.labels(labels[0]),
        )
        return found

    def collect(self) -> Any:
        """Yield the metrics that the supervisor reports; the registry calls this."""
        replicas = self.replica_status.get("replicas", ())
        for gauge, (name, is_counter, help_text) in _ENGINE_METRICS.items():
            family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
                name, help_text, labels=["model", "replica"]
            )
            for one in replicas:
                if (value := one["gauges"].get(gauge)) is not None:
                    family.add_metric([one["model"], one["name"]], value)
            yield family
        starts = CounterMetricFamily("powerband_replica_starts", "starts of a replica", labels=["model", "replica"])
        startup = GaugeMetricFamily(
            "powerband_replica_startup_seconds", "duration of the last start", labels=["model", "replica"]
        )
        for one in replicas:
            if "starts" in one:  # only who starts the replicas counts them
                starts.add_metric([one["model"], one["name"]], one["starts"])
            if one["start_s"] is not None:
                startup.add_metric([one["model"], one["name"]], one["start_s"])
        yield from (starts, startup)
        wanted = GaugeMetricFamily("powerband_replicas_wanted", "desired replicas", labels=["model"])
        for model, count in self.replica_status.get("wanted", {}).items():
            wanted.add_metric([model], count)
        yield wanted
        scaling = self.replica_status.get("scaling", {})
        for field, help_text in _SCALING_METRICS.items():
            decided = GaugeMetricFamily(f"powerband_autoscaler_{field}", help_text, labels=["model"])
            for model, decision in scaling.items():
                decided.add_metric([model], decision[field])
            yield decided
        reason = InfoMetricFamily("powerband_autoscaler", "what the autoscaler follows", labels=["model"])
        for model, decision in scaling.items():
            reason.add_metric([model], {"follows": decision["followed"]})
        yield reason

    def exposition(self, scheduler: RequestScheduler) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.running.clear()
        for name, pool in scheduler.pools.items():
            self.depth.labels(name).set(pool.depth)
            self.ready.labels(name).set(sum(one.ready for one in pool.endpoints.values()))
            for one in pool.endpoints.values():
                self.running.labels(name, one.name).set(one.running)
        for tenant, usage in scheduler.admission.usage.items():
            self.cost.labels(tenant).set(usage.usd)
        self.overflows.set(scheduler.overflows)
        self.tenants_invalid.set(bool(scheduler.admission.problem))
        self.capture_lost.set(self.capture.lost if self.capture else 0)
        return generate_latest(self.registry)

    def _problems(self, scheduler: RequestScheduler) -> list[str]:
        """Return what the operator of the fleet has to repair, in sentences."""
        found = []
        if problem := scheduler.admission.problem:
            effect = "the last valid one stays in effect" if scheduler.admission.tenants else "nobody is let in"
            found.append(f"tenants file not loaded, {effect}: {problem}")
        if self.capture and self.capture.lost:
            found.append(f"{self.capture.lost} requests could not be written to {self.capture.path.name}")
        return found

    def summary(self, scheduler: RequestScheduler) -> dict[str, Any]:
        """Return the state that the supervisor scales by and writes to status.json."""
        now_s = time.monotonic()
        return {
            "picker_pid": os.getpid(),
            "done": self.done,
            "refused": dict(scheduler.rejections),
            "overflows": scheduler.overflows,
            "problems": self._problems(scheduler),
            "recipes": {name: {**one, "ttft_s": list(one["ttft_s"])} for name, one in self.by_recipe.items()},
            "pools": {
                name: {
                    "depth": pool.depth,
                    "arrived": pool.arrived,
                    "turned_away": pool.turned_away,
                    "expired": pool.expired,
                    "late": self.late[name],
                    "wait_s": min(pool.predicted_wait_s(1, now_s), 1e9),
                    "running": {one.name: one.running for one in pool.endpoints.values()},
                }
                for name, pool in scheduler.pools.items()
            },
            "tenants": {
                name: {
                    "requests": one.requests,
                    "prompt_tokens": one.prompt_tokens,
                    "output_tokens": one.output_tokens,
                    "usd": one.usd,
                }
                for name, one in scheduler.admission.usage.items()
            },
        }
