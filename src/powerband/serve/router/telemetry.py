"""What the picker sees of the fleet, as metrics and as a summary for the supervisor."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from powerband.core.fleet import CLASSES
from powerband.core.prefix_hash import CHARACTERS_PER_TOKEN
from powerband.serve.router.redaction import redacted
from powerband.serve.router.requests import Refused
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler

_PER_DECADE = 16  # so a quantile that is read from a histogram is off by some per cent at most
_BUCKETS = tuple(round(10 ** (place / _PER_DECADE), 5) for place in range(-2 * _PER_DECADE, 2 * _PER_DECADE + 5))
_FINE = tuple(round(10 ** (place / _PER_DECADE), 6) for place in range(-3 * _PER_DECADE, 1))
_LENGTHS = (256, 1024, 4096, 16384)  # tokens of a prompt
_RECENT = 200  # answers of each recipe
_MOST_IDS = 1_000_000  # blocks of captured traffic
_OF_ENGINES = {  # what the engines count themselves: our name, whether it only grows, and what it is
    "kv_use": ("powerband_kv_use", False, "share of the KV cache in use"),
    "prefix_queries_tokens": ("powerband_prefix_queries_tokens", True, "tokens looked for in the prefix cache"),
    "prefix_hits_tokens": ("powerband_prefix_hits_tokens", True, "tokens found there"),
    "preemptions": ("powerband_preemptions", True, "requests put back for want of KV cache"),
    "spec_drafted_tokens": ("powerband_spec_drafted_tokens", True, "tokens guessed"),
    "spec_accepted_tokens": ("powerband_spec_accepted_tokens", True, "guesses that were right"),
}


class Telemetry:
    """Counters of one picker's life."""

    def __init__(self, notes: Path | None = None) -> None:
        self._first_id = next_id(notes) if notes else 0
        self._notes = notes.open("a", buffering=1) if notes else None
        self._ids: dict[int, int] = {}  # of blocks, in the order they came: not even a hash of them is written
        self.registry = CollectorRegistry()
        whose = ["model", "recipe", "class", "prompt"]

        def histogram(name: str, said: str, buckets: tuple[float, ...] = _BUCKETS) -> Histogram:
            return Histogram(name, said, whose, buckets=buckets, registry=self.registry)

        self.queue = histogram("powerband_queue_seconds", "from arrival to a replica")
        self.ttft = histogram("powerband_ttft_seconds", "from arrival to the first piece of the answer")
        self.tpot = histogram("powerband_tpot_seconds", "between two tokens, on average over an answer", _FINE)
        self.e2e = histogram("powerband_e2e_seconds", "from arrival to the end")
        self.written = Counter("powerband_output_tokens", "tokens written", ["model"], registry=self.registry)
        self.read = Counter("powerband_prompt_tokens", "tokens read", ["model"], registry=self.registry)
        self.late = Counter(
            "powerband_ttft_late",
            "first tokens, beyond the SLO or within it",
            ["model", "late"],
            registry=self.registry,
        )
        self.refusals = Counter("powerband_refusals", "requests refused, by why", ["code"], registry=self.registry)
        self.overflows = Gauge("powerband_overflows", "requests that a fallback took", registry=self.registry)
        self.depth = Gauge("powerband_queue_depth", "requests that wait", ["model"], registry=self.registry)
        self.running = Gauge(
            "powerband_running", "requests being answered", ["model", "replica"], registry=self.registry
        )
        self.ready = Gauge("powerband_replicas_ready", "replicas that answer", ["model"], registry=self.registry)
        self.cost = Gauge("powerband_tenant_usd", "what a tenant's tokens cost", ["tenant"], registry=self.registry)
        self.registry.register(self)
        self.told: Mapping[str, Any] = {}  # by the supervisor: of the replicas
        self.done = 0
        self.by_recipe: dict[str, dict[str, Any]] = {}

    def refused(self, no: Refused) -> None:
        """Count an answer of our own."""
        self.refusals.labels(no.code).inc()

    def ended(self, case: RequestContext, ended: RequestOutcome) -> None:
        """Count an answer of a replica."""
        model, ticket = case.model, case.ticket
        recipe = ticket.backend.recipe if ticket.backend else ""
        place = bisect_left(_LENGTHS, ticket.ask.prompt_tokens)
        length = f"<={_LENGTHS[place]}" if place < len(_LENGTHS) else f">{_LENGTHS[-1]}"
        whose = (model.name, recipe, CLASSES[ticket.ask.priority], length)
        self.done += 1
        self._note(case, ended)
        held = self.by_recipe.setdefault(recipe, {"done": 0, "failed": 0, "ttft_s": deque(maxlen=_RECENT)})
        held["done"] += 1
        held["failed"] += ended.status >= 500
        self.queue.labels(*whose).observe(ticket.began_s - ticket.came_s)
        if ended.first_s is not None:
            held["ttft_s"].append(round(ended.first_s, 4))
            self.ttft.labels(*whose).observe(ended.first_s)
            if model.ttft_s is not None:
                self.late.labels(model.name, "yes" if ended.first_s > model.ttft_s else "no").inc()
            if ended.pace_s is not None:
                self.tpot.labels(*whose).observe(ended.pace_s)
        if ended.total_s is not None:
            self.e2e.labels(*whose).observe(ended.total_s)
        self.written.labels(model.name).inc(ended.output_tokens)
        self.read.labels(model.name).inc(ended.prompt_tokens or ticket.ask.prompt_tokens)

    def _note(self, case: RequestContext, ended: RequestOutcome) -> None:
        """Write down when a request came, how long it was and what it began with; its words only where asked for."""
        if self._notes is None or len(self._ids) > _MOST_IDS:
            return
        ask = case.ticket.ask
        came = time.time() - (time.monotonic() - case.ticket.came_s)
        row: dict[str, Any] = {
            "timestamp": round(came * 1000),
            "input_length": ended.prompt_tokens or round(ask.prompt_tokens),
            "output_length": ended.output_tokens,
            "hash_ids": [self._ids.setdefault(block, self._first_id + len(self._ids)) for block in ask.fine],
            "characters": round(ask.prompt_tokens * CHARACTERS_PER_TOKEN),
            "turns": ask.turns,
            "model": case.model.name,
            "recipe": case.model.recipe,
            "ttft_s": ended.first_s,
            "tpot_s": ended.pace_s,
            "e2e_s": ended.total_s,
        }
        if ask.messages:
            row["messages"] = [{"role": role, "content": redacted(content)} for role, content in ask.messages]
        self._notes.write(json.dumps(row) + "\n")

    def collect(self) -> Any:
        """Yield what the supervisor told of the replicas, for the registry."""
        replicas = self.told.get("replicas", ())
        for gauge, (name, grows, said) in _OF_ENGINES.items():
            family = (CounterMetricFamily if grows else GaugeMetricFamily)(name, said, labels=["model", "replica"])
            for one in replicas:
                if (value := one["gauges"].get(gauge)) is not None:
                    family.add_metric([one["model"], one["name"]], value)
            yield family
        starts = CounterMetricFamily(
            "powerband_replica_starts", "how often it was started", labels=["model", "replica"]
        )
        took = GaugeMetricFamily("powerband_replica_startup_seconds", "of the last start", labels=["model", "replica"])
        for one in replicas:
            starts.add_metric([one["model"], one["name"]], one["starts"])
            if one["start_s"] is not None:
                took.add_metric([one["model"], one["name"]], one["start_s"])
        yield from (starts, took)
        wanted = GaugeMetricFamily("powerband_replicas_wanted", "replicas that should answer", labels=["model"])
        for model, count in self.told.get("wanted", {}).items():
            wanted.add_metric([model], count)
        yield wanted

    def exposition(self, desk: RequestScheduler) -> bytes:
        """Return all of it in Prometheus' text format."""
        self.running.clear()
        for name, pool in desk.pools.items():
            self.depth.labels(name).set(pool.depth)
            self.ready.labels(name).set(sum(one.ready for one in pool.backends.values()))
            for one in pool.backends.values():
                self.running.labels(name, one.name).set(one.running)
        for tenant, account in desk.door.accounts.items():
            self.cost.labels(tenant).set(account.usd)
        self.overflows.set(desk.overflows)
        return generate_latest(self.registry)

    def summary(self, desk: RequestScheduler) -> dict[str, Any]:
        """Return what the supervisor decides by."""
        now_s = time.monotonic()
        return {
            "done": self.done,
            "refused": dict(desk.refusals),
            "overflows": desk.overflows,
            "recipes": {name: {**held, "ttft_s": list(held["ttft_s"])} for name, held in self.by_recipe.items()},
            "pools": {
                name: {
                    "depth": pool.depth,
                    "arrived": pool.arrived,
                    "wait_s": min(pool.wait_s(1, now_s), 1e9),
                    "running": {one.name: one.running for one in pool.backends.values()},
                }
                for name, pool in desk.pools.items()
            },
            "tenants": {
                name: {"requests": one.requests, "output_tokens": one.output_tokens, "usd": one.usd}
                for name, one in desk.door.accounts.items()
            },
        }


def next_id(notes: Path) -> int:
    """Return the first number that no block of an earlier picker has."""
    if not notes.exists():
        return 0
    with notes.open() as stream:
        return 1 + max(
            (max(json.loads(line)["hash_ids"], default=-1) for line in stream if line.endswith("\n")), default=-1
        )
