"""What the picker sees of the fleet, as metrics and as a summary for the supervisor."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from powerband.serve.desk import Case, Desk, Ended
from powerband.serve.requests import Refused

_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120)


_RECENT = 200  # answers of each recipe


class Watch:
    """Counters of one picker's life."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model"]
        self.queue = Histogram(
            "powerband_queue_seconds", "from arrival to a replica", labels, buckets=_BUCKETS, registry=self.registry
        )
        self.ttft = Histogram(
            "powerband_ttft_seconds",
            "from arrival to the first piece",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "powerband_e2e_seconds", "from arrival to the end", labels, buckets=_BUCKETS, registry=self.registry
        )
        self.tokens = Counter("powerband_output_tokens", "tokens written", labels, registry=self.registry)
        self.refusals = Counter(
            "powerband_refusals", "requests that the picker answered itself", ["code"], registry=self.registry
        )
        self.depth = Gauge("powerband_queue_depth", "requests that wait", labels, registry=self.registry)
        self.running = Gauge(
            "powerband_running", "requests being answered", ["model", "replica"], registry=self.registry
        )
        self.cost = Gauge("powerband_tenant_usd", "what a tenant's tokens cost", ["tenant"], registry=self.registry)
        self.done = 0
        self.recent: list[tuple[float, str, float]] = []  # when, which model, its TTFT
        self.by_recipe: dict[str, dict[str, Any]] = {}

    def refused(self, no: Refused) -> None:
        """Count an answer of our own."""
        self.refusals.labels(no.code).inc()

    def ended(self, case: Case, ended: Ended) -> None:
        """Count an answer of a replica."""
        model, ticket = case.model.name, case.ticket
        self.done += 1
        recipe = ticket.backend.recipe if ticket.backend else ""
        held = self.by_recipe.setdefault(recipe, {"done": 0, "failed": 0, "ttft_s": deque(maxlen=_RECENT)})
        held["done"] += 1
        held["failed"] += ended.status >= 500
        if ended.first_s is not None:
            held["ttft_s"].append(round(ended.first_s, 4))
        self.queue.labels(model).observe(ticket.began_s - ticket.came_s)
        if ended.first_s is not None:
            self.ttft.labels(model).observe(ended.first_s)
            self.recent.append((time.monotonic(), model, ended.first_s))
        if ended.total_s is not None:
            self.e2e.labels(model).observe(ended.total_s)
        self.tokens.labels(model).inc(ended.output_tokens)

    def exposition(self, desk: Desk) -> bytes:
        """Return all of it in Prometheus' text format."""
        self.running.clear()
        for name, pool in desk.pools.items():
            self.depth.labels(name).set(pool.depth)
            for one in pool.backends.values():
                self.running.labels(name, one.name).set(one.running)
        for tenant, account in desk.door.accounts.items():
            self.cost.labels(tenant).set(account.usd)
        return generate_latest(self.registry)

    def summary(self, desk: Desk) -> dict[str, Any]:
        """Return what the supervisor decides by."""
        now_s = time.monotonic()
        self.recent = [one for one in self.recent if one[0] > now_s - 30]
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
                    "ttft_s": [round(ttft, 4) for _, model, ttft in self.recent if model == name][-200:],
                }
                for name, pool in desk.pools.items()
            },
            "tenants": {name: {"requests": one.requests, "output_tokens": one.output_tokens, "usd": one.usd}
                        for name, one in desk.door.accounts.items()},
        }  # fmt: skip
