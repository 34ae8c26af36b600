"""A Grafana dashboard for a fleet."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from powerband.core.recipe import Recipe

# title, unit, and queries by legend
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Time to first token (TTFT)", "s", {
        "p50": "histogram_quantile(0.5, sum by (le) (rate(powerband_ttft_seconds_bucket[5m])))",
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_ttft_seconds_bucket[5m])))",
    }),
    ("Time per output token (TPOT)", "s", {
        "p50": "histogram_quantile(0.5, sum by (le) (rate(powerband_tpot_seconds_bucket[5m])))",
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_tpot_seconds_bucket[5m])))",
    }),
    ("Queue time", "s", {
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_queue_seconds_bucket[5m])))",
    }),
    ("End-to-end latency", "s", {
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_e2e_seconds_bucket[5m])))",
    }),
    ("Requests per second", "reqps", {
        "completed": "sum by (model) (rate(powerband_e2e_seconds_count[1m]))",
        "rejected": "sum by (code) (rate(powerband_refusals_total[1m]))",
    }),
    ("Tokens per second", "short", {
        "prompt": "sum by (model) (rate(powerband_prompt_tokens_total[1m]))",
        "output": "sum by (model) (rate(powerband_output_tokens_total[1m]))",
    }),
    ("Queued and running requests", "short", {
        "queued": "sum by (model) (powerband_queue_depth)", "running": "sum by (replica) (powerband_running)",
    }),
    ("Replicas", "short", {"ready": "powerband_replicas_ready", "desired": "powerband_replicas_wanted"}),
    ("KV cache", "percentunit", {"used": "powerband_kv_use"}),
    ("Prefix-cache hit rate", "percentunit", {
        "hits": "rate(powerband_prefix_hits_tokens_total[5m]) / rate(powerband_prefix_queries_tokens_total[5m])",
    }),
    ("TTFT within SLO", "percentunit", {
        "share": 'sum(rate(powerband_ttft_late_total{late="no"}[5m])) / sum(rate(powerband_ttft_late_total[5m]))',
    }),
    ("Draft acceptance rate", "percentunit", {
        "accepted": "rate(powerband_spec_accepted_tokens_total[5m]) / rate(powerband_spec_drafted_tokens_total[5m])",
    }),
    ("Preemptions per second", "short", {"preemptions": "rate(powerband_preemptions_total[5m])"}),
    ("Replica start time", "s", {"last start": "powerband_replica_startup_seconds"}),
    ("Cost", "currencyUSD", {"by tenant": "powerband_tenant_usd"}),
    ("Requests sent to the fallback model", "short", {"overflows": "powerband_overflows"}),
)  # fmt: skip
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_SERIES = re.compile(r"\bpowerband_\w+")


def files(recipe: Recipe, *, recorded: Collection[str] | None = None) -> dict[str, str]:
    """Return the dashboard, with the queries whose series are recorded; None: all series of a fleet."""
    drawn = [(title, unit, _answered(queries, recorded)) for title, unit, queries in PANELS]
    panels = [_panel(number, *one) for number, one in enumerate(one for one in drawn if one[2])]
    dashboard = {
        "title": f"Powerband: {recipe.name}",
        "uid": "powerband-fleet",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }
    return {"dashboard.json": json.dumps(dashboard, indent=1) + "\n"}


def _answered(queries: dict[str, str], recorded: Collection[str] | None) -> dict[str, str]:
    if recorded is None:
        return queries
    return {name: query for name, query in queries.items() if set(_SERIES.findall(query)) <= set(recorded)}


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": name}
            for index, (name, query) in enumerate(queries.items())
        ],
    }
