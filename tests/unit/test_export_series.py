"""Every series that an exported rule or panel reads exists where Prometheus evaluates it.

The oracle is what the engines really exposed: the metric names in `tests/e2e/goldens`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from powerband import export
from powerband.core.recipe import Recipe
from powerband.serve.router.telemetry import Telemetry
from support.recipes import recipe

GOLDENS = Path(__file__).parents[1] / "e2e" / "goldens"
SPECULATION = {"vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"}
WORDS = {"by", "or", "and", "on", "bool"}
EVERY_RATE = {"prefix_hit_share": 0.5, "spec_accepted_share": 0.6}
OF_AN_ENGINE = {
    "vllm": ["ReplicaFlapping", "ReplicaMissing", "KVCacheFull", "Refusals", "SLOBurnsFast", "SLOBurnsSlowly",
             "PrefixHitsBelowRecipe", "AcceptanceBelowRecipe"],
    "llamacpp": ["ReplicaFlapping", "ReplicaMissing", "AcceptanceBelowRecipe"],
}  # fmt: skip


def measured(engine: str) -> Recipe:
    own = recipe(engine)
    return own.model_copy(update={"promise": own.promise.model_copy(update=EVERY_RATE)})


def series(expression: str) -> set[str]:
    """Return the metric names in an expression: what is no function, keyword, label, duration or string."""
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|without) \([^)]*\)", "", expression)
    return set(re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\w|\s*\()", text)) - WORDS


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def exposed(engine: str) -> set[str]:
    """Return the metrics that the engine exposed when its /metrics was recorded; vLLM: without speculation."""
    names = set(json.loads(next(GOLDENS.glob(f"{engine}-*.json")).read_text())["metrics"])
    return names | (SPECULATION if engine == "vllm" else set()) | {"up"}


def recorded(files: dict[str, str]) -> dict[str, str]:
    groups = yaml.safe_load(files["names.yaml"])["groups"]
    return {one["record"]: one["expr"] for group in groups for one in group["rules"]}


def rules(files: dict[str, str]) -> dict[str, str]:
    groups = yaml.safe_load(files["alerts.yaml"])["groups"]
    return {one["alert"]: one["expr"] for group in groups for one in group["rules"]}


def queries(files: dict[str, str]) -> list[str]:
    panels: list[dict[str, Any]] = json.loads(files["dashboard.json"])["panels"]
    return [target["expr"] for one in panels for target in one["targets"]]


def test_the_parser_finds_the_names() -> None:
    expression = (
        "histogram_quantile(0.9, sum by (le) (rate(a_bucket{job=\"x y\"}[5m]))) > 0.5 and b:c{late='yes'} or up"
    )
    assert series(expression) == {"a_bucket", "b:c", "up"}


@pytest.mark.parametrize("engine", OF_AN_ENGINE)
@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_alerts_on_an_engine_read_what_the_engine_exposes(engine: str, target: str) -> None:
    files = export.export(measured(engine), target)
    sources, alerts = recorded(files), rules(files)
    assert list(alerts) == OF_AN_ENGINE[engine]
    for expression in [*alerts.values(), *(queries(files) if target == "compose" else [])]:
        for name in series(expression):
            source = series(sources[name]) if name in sources else {name}
            assert {family(one) for one in source} <= exposed(engine), f"{name} in: {expression}"


@pytest.mark.parametrize("engine", OF_AN_ENGINE)
def test_alerts_on_a_fleet_read_what_the_fleet_exposes(engine: str) -> None:
    exposition = generate_latest(Telemetry().registry).decode()
    fleet = set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))
    files = export.export(measured(engine), "alerts") | export.export(measured(engine), "grafana")
    assert list(rules(files)) == OF_AN_ENGINE["vllm"]
    for expression in [*rules(files).values(), *queries(files)]:
        assert {family(one) for one in series(expression)} <= fleet, expression


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_a_recipe_without_speculation_reads_no_series_of_it(target: str) -> None:
    own = measured("vllm")
    plain = own.model_copy(update={"promise": own.promise.model_copy(update={"spec_accepted_share": None})})
    files = export.export(plain, target)
    assert "AcceptanceBelowRecipe" not in rules(files)
    read = set().union(*map(series, recorded(files).values()))
    assert {family(one) for one in read} <= exposed("vllm") - SPECULATION


def test_rules_read_one_scrape_job_and_one_model() -> None:
    files = export.export(measured("vllm"), "compose")
    jobs = [one["job_name"] for one in yaml.safe_load(files["prometheus.yaml"])["scrape_configs"]]
    assert jobs == ["smollm2"]
    assert all('{job="smollm2"}' in source for source in recorded(files).values())
    labels = [one["labels"] for one in yaml.safe_load(files["names.yaml"])["groups"][0]["rules"]]
    assert all(one == {"model": "smollm2"} for one in labels)
    for expression in rules(files).values():
        selected = re.findall(r'(?:powerband_\w+\{model|up\{job)="smollm2"\}', expression)
        assert len(selected) == len(re.findall(r"powerband_\w+|\bup\b", expression)), expression


def test_the_error_budget_of_a_histogram_is_a_quantile() -> None:
    alerts = rules(export.export(measured("vllm"), "kubernetes"))
    # 5% of the requests may be late: a burn of 14.4 is 72%, so the 28th percentile of TTFT is above the limit
    buckets = 'sum by (le) (rate(powerband_ttft_seconds_bucket{model="smollm2"}[5m]))'
    assert alerts["SLOBurnsFast"] == f"histogram_quantile(0.28, {buckets}) > 0.5"
    assert alerts["SLOBurnsSlowly"].startswith("histogram_quantile(0.85,")


def test_a_dashboard_of_an_engine_has_no_empty_panel() -> None:
    board = json.loads(export.export(measured("llamacpp"), "compose")["dashboard.json"])
    titles = [one["title"] for one in board["panels"]]
    assert "Draft acceptance rate" in titles and "Cost" not in titles and "Time to first token (TTFT)" not in titles
    assert all(one["targets"] for one in board["panels"])
