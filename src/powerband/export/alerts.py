"""Prometheus rules: what wakes somebody up, by the recipe's own figures; and an engine's series under our names."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import MUCH_LESS, Recipe
from powerband.engines import rules
from powerband.export.container import text

_LESS = {"prefix_hits_tokens": "PrefixHitsBelowRecipe", "spec_accepted_tokens": "AcceptanceBelowRecipe"}
_GROWING = ("tokens", "preemptions")  # gauges that are named so only grow


def files(recipe: Recipe) -> dict[str, str]:
    """Return the rules."""
    found = [
        _rule("ReplicaFlapping", "increase(powerband_replica_starts_total[15m]) > 3", "1m", "page",
              "{{ $labels.replica }} was started more than three times in a quarter of an hour"),
        _rule("ReplicaMissing", "powerband_replicas_ready < powerband_replicas_wanted", "1m", "page",
              "{{ $labels.model }} has fewer replicas than wanted"),
        _rule("KVCacheFull", "powerband_kv_use > 0.9", "2m", "ticket",
              "{{ $labels.replica }} uses more than 90 % of its KV cache"),
        _rule("Refusals", "sum(rate(powerband_refusals_total{code=\"overloaded\"}[5m])) > 0.05 * "
              "sum(rate(powerband_e2e_seconds_count[5m]))", "5m", "page",
              "more than 5 % of the requests are refused for want of room"),
    ]  # fmt: skip
    bounds = [(limit, share) for metric, share, limit in recipe.promise.slo.bounds() if metric == "ttft"]
    if bounds:
        limit, share = min(bounds)
        for name, window, burn, lasting, severity in (
            ("SLOBurnsFast", "5m", 14.4, "2m", "page"), ("SLOBurnsSlowly", "1h", 3.0, "15m", "ticket"),
        ):  # fmt: skip
            late = (
                f"sum(rate(powerband_ttft_late_total{{late='yes'}}[{window}]))"
                f" / sum(rate(powerband_ttft_late_total[{window}]))"
            )
            said = f"first tokens come later than {limit:g} s more often than the error budget allows"
            found.append(_rule(name, f"{late} > {min(burn * (1 - share), 0.9):.3g}", lasting, severity, said))
    for part, whole, proven in recipe.promise.shares():
        share_now = f"sum(rate(powerband_{part}_total[15m])) / sum(rate(powerband_{whole}_total[15m]))"
        said = f"{{{{ $value | humanizePercentage }}}}, the recipe was proven with {proven:.0%}"
        found.append(_rule(_LESS[part], f"{share_now} < {MUCH_LESS * proven:.3g}", "15m", "ticket", said))
    return {"alerts.yaml": text({"groups": [{"name": "powerband", "rules": found}]})}


def _rule(name: str, expression: str, lasting: str, severity: str, said: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": said},
    }


def names(engine: str) -> dict[str, str]:
    """Return rules that record what an engine tells itself under the fleet's names: for where no fleet is before it."""
    facts = rules.facts(engine)
    found = {"powerband_replicas_ready": "sum(up)", "powerband_replicas_wanted": "count(up)"}
    for name, theirs in facts.gauges.items():
        if not name.startswith("ttft_"):
            found[f"powerband_{name}{'_total' if name.endswith(_GROWING) else ''}"] = theirs
    for name, theirs in facts.histograms.items():
        found |= {f"powerband_{name}_{part}": f"{theirs}_{part}" for part in ("bucket", "count", "sum")}
    recorded = [{"record": ours, "expr": theirs} for ours, theirs in found.items()]
    return {"names.yaml": text({"groups": [{"name": "powerband-names", "interval": "5s", "rules": recorded}]})}
