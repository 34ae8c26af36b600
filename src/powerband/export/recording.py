"""Prometheus rules that record an engine's own series under the fleet's names, for engines that run without a fleet."""

from __future__ import annotations

from powerband.core.recipe import Recipe
from powerband.engines import rules
from powerband.export.container import to_yaml

_COUNTERS = ("tokens", "preemptions")  # how the names of counters end
_SPECULATION = "spec_"  # how the names of its gauges begin
_FLEET_NAMES = {"refused_requests": "refusals_total"}  # where the fleet's name differs from the gauge's


def recorded(recipe: Recipe, job: str) -> dict[str, str]:
    """Return the expression of each recorded series, over the targets of one scrape job.

    Engines expose the series of speculative decoding only where it is on, so other recipes have no rule for them.
    """
    facts, selector = rules.facts(recipe.deployment["engine"]), f'{{job="{job}"}}'
    drafts = any(part.startswith(_SPECULATION) for part, _, _ in recipe.promise.proven_shares())
    found = {
        "powerband_replicas_ready": f"sum(up{selector})",
        "powerband_replicas_wanted": f"count(up{selector})",
    }
    for name, series in facts.gauges.items():
        if not name.startswith("ttft_") and (drafts or not name.startswith(_SPECULATION)):
            suffix = "_total" if name.endswith(_COUNTERS) else ""
            found[f"powerband_{_FLEET_NAMES.get(name, name + suffix)}"] = f"{series}{selector}"
    for name, series in facts.histograms.items():
        for part in ("bucket", "count", "sum"):
            found[f"powerband_{name}_{part}"] = f"{series}_{part}{selector}"
    return found


def files(recipe: Recipe, job: str) -> dict[str, str]:
    """Return the recording rules; recorded series have the label `model`, as a fleet's series do."""
    rows = [
        {"record": name, "expr": expression, "labels": {"model": job}}
        for name, expression in recorded(recipe, job).items()
    ]
    return {"names.yaml": to_yaml({"groups": [{"name": "powerband-names", "interval": "5s", "rules": rows}]})}
