"""Prometheus rules: alerts with the recipe's own thresholds, and an engine's series recorded under our names."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import ALERT_RATIO, Recipe
from powerband.engines import rules
from powerband.export.container import to_yaml

_RATE_ALERTS = {"prefix_hits_tokens": "PrefixHitsBelowRecipe", "spec_accepted_tokens": "AcceptanceBelowRecipe"}
_COUNTER_SUFFIXES = ("tokens", "preemptions")


def files(recipe: Recipe) -> dict[str, str]:
    """Return the alerting rules."""
    found = [
        _rule("ReplicaFlapping", "increase(powerband_replica_starts_total[15m]) > 3", "1m", "page",
              "{{ $labels.replica }} started more than 3 times in 15 minutes"),
        _rule("ReplicaMissing", "powerband_replicas_ready < powerband_replicas_wanted", "1m", "page",
              "{{ $labels.model }} has fewer ready replicas than desired"),
        _rule("KVCacheFull", "powerband_kv_use > 0.9", "2m", "ticket",
              "{{ $labels.replica }} uses more than 90% of its KV cache"),
        _rule("Refusals", "sum(rate(powerband_refusals_total{code=\"overloaded\"}[5m])) > 0.05 * "
              "sum(rate(powerband_e2e_seconds_count[5m]))", "5m", "page",
              "more than 5% of the requests are rejected because the fleet is overloaded"),
    ]  # fmt: skip
    bounds = [(limit, share) for metric, share, limit in recipe.promise.slo.bounds() if metric == "ttft"]
    if bounds:
        limit, share = min(bounds)
        for name, window, burn, duration, severity in (
            ("SLOBurnsFast", "5m", 14.4, "2m", "page"), ("SLOBurnsSlowly", "1h", 3.0, "15m", "ticket"),
        ):  # fmt: skip
            late = (
                f"sum(rate(powerband_ttft_late_total{{late='yes'}}[{window}]))"
                f" / sum(rate(powerband_ttft_late_total[{window}]))"
            )
            summary = f"TTFT exceeds {limit:g} s in more requests than the error budget allows"
            found.append(_rule(name, f"{late} > {min(burn * (1 - share), 0.9):.3g}", duration, severity, summary))
    for part, whole, recipe_rate in recipe.promise.proven_shares():
        rate = f"sum(rate(powerband_{part}_total[15m])) / sum(rate(powerband_{whole}_total[15m]))"
        summary = f"{{{{ $value | humanizePercentage }}}}; the recipe was measured with {recipe_rate:.0%}"
        found.append(_rule(_RATE_ALERTS[part], f"{rate} < {ALERT_RATIO * recipe_rate:.3g}", "15m", "ticket", summary))
    return {"alerts.yaml": to_yaml({"groups": [{"name": "powerband", "rules": found}]})}


def _rule(name: str, expression: str, duration: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": duration,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


def recording_rules(engine: str) -> dict[str, str]:
    """Return rules that record an engine's series under the fleet's names, for engines that run without a fleet."""
    facts = rules.facts(engine)
    found = {"powerband_replicas_ready": "sum(up)", "powerband_replicas_wanted": "count(up)"}
    for name, series in facts.gauges.items():
        if not name.startswith("ttft_"):
            found[f"powerband_{name}{'_total' if name.endswith(_COUNTER_SUFFIXES) else ''}"] = series
    for name, series in facts.histograms.items():
        found |= {f"powerband_{name}_{part}": f"{series}_{part}" for part in ("bucket", "count", "sum")}
    recorded = [{"record": name, "expr": series} for name, series in found.items()]
    return {"names.yaml": to_yaml({"groups": [{"name": "powerband-names", "interval": "5s", "rules": recorded}]})}
