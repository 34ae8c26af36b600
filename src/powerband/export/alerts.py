"""Prometheus alerts with the recipe's own thresholds, from the series that a fleet or a single engine has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from powerband.core.recipe import ALERT_RATIO, Recipe
from powerband.export import recording
from powerband.export.container import to_yaml

_RATE_ALERTS = {"prefix_hits_tokens": "PrefixHitsBelowRecipe", "spec_accepted_tokens": "AcceptanceBelowRecipe"}
_RESTARTS = 3  # in 15 minutes
_BURNS = (("SLOBurnsFast", "5m", 14.4, "2m", "page"), ("SLOBurnsSlowly", "1h", 3.0, "15m", "ticket"))
_MAX_LATE_SHARE = 0.9  # an alert for a larger share of late requests could not fire
_SERIES = re.compile(r"\bpowerband_\w+")

LateRequests = Callable[[str, float, float], str]  # window, share of late requests, TTFT limit: an expression


def files(recipe: Recipe) -> dict[str, str]:
    """Return the alerts for a fleet of `powerband serve`."""
    found = [
        _flapping(f"increase(powerband_replica_starts_total[15m]) > {_RESTARTS}", "replica"),
        *_common("replica", '{code="overloaded"}'),
        *_burns(recipe, _late_by_counter),
        *_shares(recipe),
    ]
    return _group(found)


def engine_files(recipe: Recipe, job: str) -> dict[str, str]:
    """Return recording rules, and the alerts that they allow, for engines that Prometheus scrapes as one job."""
    known = recording.recorded(recipe, job)
    candidates = [
        _flapping(f'changes(up{{job="{job}"}}[15m]) > {2 * _RESTARTS}', "instance"),
        *_common("instance", ""),
        *_burns(recipe, _late_by_quantile),
        *_shares(recipe),
    ]
    found = [one for one in candidates if known.keys() >= set(_SERIES.findall(one["expr"]))]
    for one in found:
        one["expr"] = _SERIES.sub(lambda series: f'{series[0]}{{model="{job}"}}', one["expr"])
    return recording.files(recipe, job) | _group(found)


def _group(found: list[dict[str, Any]]) -> dict[str, str]:
    return {"alerts.yaml": to_yaml({"groups": [{"name": "powerband", "rules": found}]})}


def _flapping(expression: str, replica: str) -> dict[str, Any]:
    summary = f"{{{{ $labels.{replica} }}}} started more than {_RESTARTS} times in 15 minutes"
    return _rule("ReplicaFlapping", expression, "1m", "page", summary)


def _common(replica: str, overloaded: str) -> Iterator[dict[str, Any]]:
    """Yield the alerts whose expressions are the same for a fleet and an engine, but for a label."""
    yield _rule("ReplicaMissing", "powerband_replicas_ready < powerband_replicas_wanted", "1m", "page",
                "{{ $labels.model }} has fewer ready replicas than desired")  # fmt: skip
    yield _rule("KVCacheFull", "powerband_kv_use > 0.9", "2m", "ticket",
                f"{{{{ $labels.{replica} }}}} uses more than 90% of its KV cache")  # fmt: skip
    yield _rule("Refusals", f"sum(rate(powerband_refusals_total{overloaded}[5m])) > 0.05 * "
                "sum(rate(powerband_e2e_seconds_count[5m]))", "5m", "page",
                "more than 5% of the requests are rejected because all replicas are overloaded")  # fmt: skip


def _burns(recipe: Recipe, late: LateRequests) -> Iterator[dict[str, Any]]:
    """Yield the alerts on the error budget of TTFT, if the SLO limits it."""
    bounds = [(limit, share) for metric, share, limit in recipe.promise.slo.bounds() if metric == "ttft"]
    if not bounds:
        return
    limit, share = min(bounds)
    summary = f"TTFT exceeds {limit:g} s in more requests than the error budget allows"
    for name, window, burn, duration, severity in _BURNS:
        late_share = min(burn * (1 - share), _MAX_LATE_SHARE)
        yield _rule(name, late(window, late_share, limit), duration, severity, summary)


def _late_by_counter(window: str, share: float, limit: float) -> str:
    late, every = (f"sum(rate(powerband_ttft_late_total{one}[{window}]))" for one in ("{late='yes'}", ""))
    return f"{late} / {every} > {share:.3g}"


def _late_by_quantile(window: str, share: float, limit: float) -> str:
    """Return the same condition for a histogram: a share of requests is late if that quantile is above the limit."""
    buckets = f"sum by (le) (rate(powerband_ttft_seconds_bucket[{window}]))"
    return f"histogram_quantile({1 - share:.3g}, {buckets}) > {limit:g}"


def _shares(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the alerts on counter shares, which the recipe was measured with."""
    for part, whole, recipe_rate in recipe.promise.proven_shares():
        rate = f"sum(rate(powerband_{part}_total[15m])) / sum(rate(powerband_{whole}_total[15m]))"
        summary = f"{{{{ $value | humanizePercentage }}}}; the recipe was measured with {recipe_rate:.0%}"
        yield _rule(_RATE_ALERTS[part], f"{rate} < {ALERT_RATIO * recipe_rate:.3g}", "15m", "ticket", summary)


def _rule(name: str, expression: str, duration: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": duration,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }
