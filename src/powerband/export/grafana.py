"""A Grafana dashboard of a fleet."""

from __future__ import annotations

import json
from typing import Any

from powerband.core.recipe import Recipe

# title, unit, and what is drawn
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("First token", "s", {
        "p50": "histogram_quantile(0.5, sum by (le) (rate(powerband_ttft_seconds_bucket[5m])))",
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_ttft_seconds_bucket[5m])))",
    }),
    ("Between tokens", "s", {
        "p50": "histogram_quantile(0.5, sum by (le) (rate(powerband_tpot_seconds_bucket[5m])))",
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_tpot_seconds_bucket[5m])))",
    }),
    ("Wait in the queue", "s", {
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_queue_seconds_bucket[5m])))",
    }),
    ("Whole answer", "s", {
        "p95": "histogram_quantile(0.95, sum by (le) (rate(powerband_e2e_seconds_bucket[5m])))",
    }),
    ("Requests", "reqps", {
        "answered": "sum by (model) (rate(powerband_e2e_seconds_count[1m]))",
        "refused": "sum by (code) (rate(powerband_refusals_total[1m]))",
    }),
    ("Tokens a second", "short", {
        "read": "sum by (model) (rate(powerband_prompt_tokens_total[1m]))",
        "written": "sum by (model) (rate(powerband_output_tokens_total[1m]))",
    }),
    ("Waiting and running", "short", {
        "waiting": "sum by (model) (powerband_queue_depth)", "running": "sum by (replica) (powerband_running)",
    }),
    ("Replicas", "short", {"ready": "powerband_replicas_ready", "wanted": "powerband_replicas_wanted"}),
    ("KV cache", "percentunit", {"use": "powerband_kv_use"}),
    ("Prefix cache", "percentunit", {
        "hits": "rate(powerband_prefix_hits_tokens_total[5m]) / rate(powerband_prefix_queries_tokens_total[5m])",
    }),
    ("In time", "percentunit", {
        "share": 'sum(rate(powerband_ttft_late_total{late="no"}[5m])) / sum(rate(powerband_ttft_late_total[5m]))',
    }),
    ("Guesses accepted", "percentunit", {
        "share": "rate(powerband_spec_accepted_tokens_total[5m]) / rate(powerband_spec_drafted_tokens_total[5m])",
    }),
    ("Put back for want of KV cache", "short", {"preemptions": "rate(powerband_preemptions_total[5m])"}),
    ("Start-up", "s", {"of each replica": "powerband_replica_startup_seconds"}),
    ("Cost", "currencyUSD", {"by tenant": "powerband_tenant_usd"}),
    ("Overflows", "short", {"to the fallback": "powerband_overflows"}),
)  # fmt: skip
_WIDTH, _HEIGHT, _ACROSS = 8, 7, 3


def files(recipe: Recipe) -> dict[str, str]:
    """Return the dashboard."""
    panels = [_panel(number, *one) for number, one in enumerate(PANELS)]
    board = {
        "title": f"Powerband: {recipe.name}",
        "uid": "powerband-fleet",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }
    return {"dashboard.json": json.dumps(board, indent=1) + "\n"}


def _panel(number: int, title: str, unit: str, drawn: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _ACROSS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": name}
            for place, (name, query) in enumerate(drawn.items())
        ],
    }
