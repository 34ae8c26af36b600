"""Prometheus rules: what wakes somebody up, by the recipe's own figures."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import Recipe
from powerband.export.container import text

_TARGET = 0.95  # of the requests begin in time; the rest is the error budget


def files(recipe: Recipe) -> dict[str, str]:
    """Return the rules."""
    limit = min((bound for metric, _, bound in recipe.promise.slo.bounds() if metric == "ttft"), default=None)
    rules = [
        _rule("ReplicaFlapping", "increase(powerband_replica_starts_total[15m]) > 3", "1m", "page",
              "{{ $labels.replica }} was started more than three times in a quarter of an hour"),
        _rule("ReplicaMissing", "powerband_replicas_ready < powerband_replicas_wanted", "2m", "page",
              "{{ $labels.model }} has fewer replicas than wanted"),
        _rule("KVCacheFull", "powerband_kv_use > 0.9", "2m", "ticket",
              "{{ $labels.replica }} uses more than 90 % of its KV cache"),
        _rule("Refusals", "sum(rate(powerband_refusals_total{code=\"overloaded\"}[5m])) > 0.05 * "
              "sum(rate(powerband_e2e_seconds_count[5m]))", "5m", "page",
              "more than 5 % of the requests are refused for want of room"),
    ]  # fmt: skip
    if limit is not None:
        for name, window, burn, lasting, severity in (
            ("SLOBurnsFast", "5m", 14.4, "2m", "page"), ("SLOBurnsSlowly", "1h", 3.0, "15m", "ticket"),
        ):  # fmt: skip
            late = (
                f"sum(rate(powerband_ttft_late_total{{late='yes'}}[{window}]))"
                f" / sum(rate(powerband_ttft_late_total[{window}]))"
            )
            said = f"first tokens come later than {limit:g} s more often than the error budget allows"
            rules.append(_rule(name, f"{late} > {burn} * {1 - _TARGET:g}", lasting, severity, said))
    return {"alerts.yaml": text({"groups": [{"name": "powerband", "rules": rules}]})}


def _rule(name: str, expression: str, lasting: str, severity: str, said: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": said},
    }
