"""Render a study and its recipe for a terminal and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.study import Settings, Study, Trial, best, render_settings
from powerband.reports import format, html
from powerband.reports.svg import Chart

_STYLES = {
    "feasible": "green",
    "screened": "cyan",
    "slower": "dim",
    "too slow": "yellow",
    "below the floor": "bold red",
    "failed": "red",
    "inconclusive": "magenta",
    "ruled out": "dim",
}
_CSS = {"feasible": "good", "below the floor": "bad", "failed": "bad", "slower": "quiet", "ruled out": "quiet"}
_COLOURS = ("first", "second", "third", "fourth")


def tables(study: Study, recipe: Recipe | None) -> Iterator[RenderableType]:
    """Yield the trials, the ablation, the baselines and the recipe; without a recipe, how near each trial came."""
    yield trials(study.trials, study.defaults)
    if _splits(study):
        yield Text("\nbest trial for each number of devices per replica", "bold")
        yield splits(study)
    if recipe is None:
        yield Text("\nlatency over its SLO bound at the lowest load measured", "bold")
        yield distances(study)
        yield Text(study.outlook, "dim")
        return
    if recipe.ablation:
        yield Text(f"\nablation: {_objective(study)} of the recipe over that with one lever at its default", "bold")
        for one in recipe.ablation:
            yield Text(f"  {one.name:44} {_ratio(one)}")
    if recipe.baselines:
        yield Text(f"\nbaselines: {_objective(study)} of the recipe over that with default settings", "bold")
    for one in recipe.baselines:
        yield Text(f"  {one.name:44} {_ratio(one)}")
    yield Text.assemble(("\nrecipe: ", "bold"), _sentence(study, recipe))
    yield Text(recipe.summary, "green")
    if study.outlook:
        yield Text(study.outlook, "dim")


def line(trial: Trial, defaults: Mapping[str, Settings]) -> Text:
    """Return a trial as one line; `defaults` holds each engine's default settings."""
    text = Text.assemble(f"{trial.number:4}  ", (f"{trial.outcome:16}", _STYLES[trial.outcome]), f"{_rate(trial):>8}  ")
    return text.append(render_settings(trial.settings, defaults)).append(f"  {trial.reason}", "dim")


def trials(found: Sequence[Trial], defaults: Mapping[str, Settings], *, last: int | None = None) -> Table:
    """Return a table of the trials that started, or of the best and the last of them; the best is bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head in ("", "outcome", "max rate", "expected", "settings", "reason"):
        table.add_column(head, justify="right" if head in ("", "max rate", "expected") else "left", overflow="ellipsis")
    started = [one for one in found if one.outcome != "ruled out"]
    first = best(started)
    shown = started if last is None else started[-last:]
    for one in [first, *shown] if first and first not in shown else shown:
        expected = one.expected_per_s
        table.add_row(
            str(one.number),
            Text(one.outcome, _STYLES[one.outcome]),
            _rate(one),
            f"{format.number(expected.value)}/s" if expected else "",
            render_settings(one.settings, defaults),
            one.reason[:80],
            style="bold" if one is first else "",
        )
    return table


def _rate(trial: Trial) -> str:
    """Return the measured max rate, or the estimate after a tilde."""
    if trial.max_rate_per_s:
        return f"{format.number(trial.max_rate_per_s)}/s"
    return f"~{format.number(trial.estimate_per_s.value)}/s" if trial.estimate_per_s else ""


def splits(study: Study) -> Table:
    """Return a table of the best trial for each number of devices, with its price and its cost per request."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head in _SPLIT_HEADS:
        table.add_column(head, justify="left" if head == "settings" else "right", overflow="fold")
    for row in _splits(study):
        table.add_row(*row)
    return table


_SPLIT_HEADS = ("devices", "$/h", "max rate", "$ per 1M requests", "settings")


def _splits(study: Study) -> list[list[str]]:
    """Return the best trial for each number of devices per replica; empty if all trials used one device."""
    able = sorted((one for one in study.trials if one.outcome in ("feasible", "screened")), key=lambda one: -one.value)
    best_of = {one.devices: one for one in reversed(able)}
    if set(best_of) <= {1}:
        return []
    return [
        [
            str(count),
            f"{count * study.usd_per_h:.2f}",
            _rate(one),
            f"{1e6 / one.value:.2f}" if one.value else "",
            render_settings(one.settings, study.defaults),
        ]
        for count, one in sorted(best_of.items())
    ]


def _objective(study: Study) -> str:
    """Return what the ratios of deployments compare."""
    return "requests per dollar" if _splits(study) else "max rate"


def distances(study: Study) -> Table:
    """Return a table of the trials that missed the SLO or the quality floor, the nearest first."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head in ("settings", "over the bound", "reason"):
        table.add_column(head, justify="right" if head == "over the bound" else "left", overflow="fold")
    for one in sorted(study.trials, key=lambda trial: trial.excess or math.inf):
        if one.outcome != "ruled out":
            factor = f"{one.excess:.2f}" if one.excess else ""
            table.add_row(render_settings(one.settings, study.defaults), factor, f"{one.outcome}: {one.reason}")
    return table


def _ratio(one: BaselineComparison) -> str:
    if one.ratio is None:
        return one.why or ("meets the SLO at no request rate" if one.max_rate_per_s is None else "")
    return f"{one.ratio.value:.2f} [{one.ratio.low:.2f}, {one.ratio.high:.2f}]"


def _sentence(study: Study, recipe: Recipe) -> str:
    promise = recipe.promise
    bounds = ", ".join(
        f"{metric.upper()} p{share * 100:g} <= {format.seconds(limit)}" for metric, share, limit in promise.slo.bounds()
    )
    floor = f" and the quality floor '{promise.quality.name or 'custom'}'" if promise.quality else ""
    return (
        f"{render_settings(recipe.settings, study.defaults)} meets {bounds}{floor} at "
        f"{format.number(promise.rate_per_s)} req/s, for ${recipe.usd_per_1m_tokens:.3g} per 1M tokens"
    )


def page(study: Study, recipe: Recipe, blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the study as one self-contained page; `blocks` are the entries of validation.jsonl."""
    title = f"Recipe for {study.name}"
    head = f"<header><h1>{escape(title)}</h1><p>{escape(_sentence(study, recipe))}.</p>"
    head += f"<p>{escape(recipe.devices)} per replica, ${recipe.usd_per_h:.2f} per hour.</p>" if recipe.gpus else ""
    head += f"<p class='banner good'><b>Validated.</b> {escape(recipe.summary)}.</p></header>"
    charts = [_pareto(study), _ablation(study, recipe), *_latency_by_rate(study, recipe, blocks)]
    parts = [
        head,
        f"<section class='charts'>{''.join(charts)}</section>",
        _baselines(study, recipe),
        _by_split(study),
        _speculation(study),
        _trials(study),
        _validity(recipe),
    ]
    documents = f"<pre>{escape(recipe.workload.to_text())}</pre><pre>{escape(recipe.promise.slo.to_text())}</pre>"
    if recipe.promise.quality:
        documents += f"<pre>{escape(recipe.promise.quality.to_text())}</pre>"
    parts.append(f"<section><h2>Command</h2><pre>{escape(recipe.command)}</pre>")
    parts.append(f"<details><summary>Workload, SLO and quality floor</summary>{documents}</details></section>")
    return html.page(title, "".join(parts))


def page_without_recipe(study: Study, reason: str) -> str:
    """Return the page of a study in which no configuration met the SLO and the quality floor."""
    title = f"No recipe for {study.name}"
    head = f"<header><h1>{escape(title)}</h1><p class='banner bad'>{escape(reason)}.</p></header>"
    rows = [
        [escape(render_settings(one.settings, study.defaults)), f"{one.excess:.2f}"]
        for one in sorted(study.trials, key=lambda trial: trial.excess or math.inf)
        if one.excess
    ]
    heads = ["settings", "latency over its SLO bound at the lowest load measured"]
    near = f"<section><h2>How near each came</h2>{html.table(heads, rows, css='left')}</section>" if rows else ""
    documents = f"<section><details><summary>Workload and SLO</summary><pre>{escape(study.workload.to_text())}</pre>"
    documents += f"<pre>{escape(study.slo.to_text())}</pre></details></section>"
    return html.page(title, "".join((head, near, _trials(study), documents)))


def _pareto(study: Study) -> str:
    """Chart requests per dollar against divergence from the reference, one point per trial."""
    points = [one for one in study.trials if one.value and one.kl is not None]
    if len(points) < 2:
        return ""
    max_kl = max(one.kl or 0.0 for one in points)
    limit = study.quality.fidelity.get("kl_mean") if study.quality else None
    far = 1.1 * max(max_kl, limit.limit if limit else 0.0)
    high = 1.1 * max(one.value for one in points)
    spans = (-0.03 * far, far), (0.0, high)
    labels = ("Cost against quality", "KL divergence from the reference", "requests within the SLO per dollar")
    chart = Chart(*labels, *spans, y_text=lambda value: f"{value / 1000:g}k")
    for name, css in (("feasible", _COLOURS[0]), ("not feasible", _COLOURS[1])):
        chart.legend.append((name, css))
    for one in points:
        css = _COLOURS[0] if one.outcome == "feasible" else _COLOURS[1]
        label = f"{render_settings(one.settings, study.defaults)}: {one.outcome} {one.reason}"
        chart.dots([(one.kl or 0.0, one.value, one.value, one.value, label)], css)
    if limit:
        chart.vertical_limit(limit.limit, "floor")
    return f"<figure>{chart.render()}</figure>"


def _ablation(study: Study, recipe: Recipe) -> str:
    """Chart the max rate of the recipe over that with one lever at its default."""
    shown = [(one.name, one.ratio, _ratio(one)) for one in recipe.ablation]
    title = f"Ablation: {_objective(study)} over that with one lever at its default"
    return html.bars(title, shown) if shown else ""


def _by_split(study: Study) -> str:
    """Tabulate the best trial for each number of devices per replica."""
    rows = [[escape(cell) for cell in row] for row in _splits(study)]
    table = html.table(list(_SPLIT_HEADS), rows, css="left")
    note = f"<p>Each device costs ${study.usd_per_h:.2f} per hour. A tilde marks an estimate.</p>"
    return f"<section><h2>Devices per replica</h2>{table}{note}</section>" if rows else ""


def _latency_by_rate(study: Study, recipe: Recipe, blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Chart each bounded percentile by request rate, for every contender of the validation."""
    for metric, share, limit in recipe.promise.slo.bounds():
        bound, by_name = f"{metric} p{share * 100:g}", dict[str, list[tuple[float, float]]]()
        for block in blocks:
            default = block["settings"] in study.defaults.values()
            name = "recipe" if block["settings"] == recipe.settings else str(block["name"]) if default else "runner-up"
            by_name.setdefault(name, []).extend(
                (level["rate_per_s"], level[bound]) for level in block["levels"] if level.get(bound)
            )
        every = [point for found in by_name.values() for point in found]
        if not every:
            continue
        rates, high = [rate for rate, _ in every], min(3 * limit, max(value for _, value in every))
        spans = (0.9 * min(rates), 1.05 * max(rates)), (0.0, 1.1 * max(high, limit))
        chart = Chart(f"{metric.upper()} p{share * 100:g}", "requests per second", "", *spans, y_text=format.seconds)
        for css, (name, found) in zip(_COLOURS, by_name.items(), strict=False):
            chart.dots([(rate, value, value, value, f"{name}: {format.seconds(value)}") for rate, value in found], css)
            chart.legend.append((name, css))
        chart.horizontal_limit(limit, f"SLO {format.seconds(limit)}")
        yield f"<figure>{chart.render()}</figure>"


def _baselines(study: Study, recipe: Recipe) -> str:
    def rate(one: BaselineComparison) -> str:
        if one.max_rate_per_s:
            return f"{format.number(one.max_rate_per_s)}/s"
        return "not measured" if one.why else "none"

    rows = [[escape(one.name), rate(one), escape(_ratio(one))] for one in recipe.baselines]
    heads = ["baseline", "max rate within the SLO", f"{_objective(study)} of the recipe over it"]
    return (
        f"<section><h2>Compared with default settings</h2>{html.table(heads, rows, css='left')}</section>"
        if rows
        else ""
    )


def _trials(study: Study) -> str:
    rows = []
    for one in sorted(study.trials, key=lambda trial: -trial.value):
        expected = f"{format.number(one.expected_per_s.value)}/s" if one.expected_per_s else ""
        rate = _rate(one)
        settings = escape(render_settings(one.settings, study.defaults))
        css = _CSS.get(one.outcome, "unsure")
        rows.append([str(one.number), f"<b class='{css}'>{one.outcome}</b>", rate, expected,
                     settings, escape(one.reason), f"{one.seconds:.0f} s"])  # fmt: skip
    heads = ["", "outcome", "max rate", "expected", "settings", "reason", "duration"]
    outlook = f" {escape(study.outlook[:1].upper() + study.outlook[1:])}." if study.outlook else ""
    note = f"<p>A tilde marks an estimate from a few closed-loop requests.{outlook}</p>"
    return f"<section><h2>All trials</h2>{html.table(heads, rows, css='left')}{note}</section>"


def _speculation(study: Study) -> str:
    """Tabulate output speed by speculation setting and number of concurrent users."""
    user_counts = sorted({one.users for one in study.drafts})
    found = {(one.engine, one.setting, one.users): one for one in study.drafts}
    rows = []
    for engine, setting in dict.fromkeys((one.engine, one.setting) for one in study.drafts):
        row = [escape(engine), escape(setting)]
        for users in user_counts:
            one = found.get((engine, setting, users))
            accepted = f", {one.accepted:.0%} accepted" if one and one.accepted is not None else ""
            row.append(f"{format.number(one.tokens_per_s)}{accepted}" if one else "")
        rows.append(row)
    heads = ["engine", "speculation", *(f"tokens/s at {users} users" for users in user_counts)]
    return f"<section><h2>Speculative decoding</h2>{html.table(heads, rows, css='left')}</section>" if rows else ""


def _validity(recipe: Recipe) -> str:
    rows = [
        [
            escape(name.replace("_", " ")),
            format.number(one.low) + (f" to {format.number(one.high)}" * (one.low < one.high)),
        ]
        for name, one in recipe.validity.items()
    ]
    return f"<section><h2>Validated traffic</h2>{html.table(['property', 'range'], rows, css='left')}</section>"


_IGNORED = ("name", "summary", "evidence", "provenance", "command", "ablation", "baselines")


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the values in which two recipes differ, by path, without texts and results derived from them."""
    sides = [dict(_leaves({key: value for key, value in recipe.to_data(units=True).items() if key not in _IGNORED}))
             for recipe in (one, other)]  # fmt: skip
    paths = dict.fromkeys([*sides[0], *sides[1]])
    pairs = {path: (sides[0].get(path), sides[1].get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value
