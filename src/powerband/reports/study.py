"""Render a study and its recipe, for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.study import Settings, Study, Trial, best
from powerband.reports import format, html
from powerband.reports.svg import Chart

_STYLES = {
    "feasible": "green",
    "too slow": "yellow",
    "below the floor": "bold red",
    "failed": "red",
    "ruled out": "dim",
}
_CSS = {"feasible": "good", "too slow": "unsure", "below the floor": "bad", "failed": "bad", "ruled out": "quiet"}
_COLOURS = ("first", "second", "third", "fourth")


def tables(study: Study, recipe: Recipe) -> Iterator[RenderableType]:
    """Return what was tried, the answer, and what each lever brought."""
    yield trials(study.trials)
    if recipe.ablation:
        yield Text("\nwhat each lever brought: the recipe's load over that without it", "bold")
        for one in recipe.ablation:
            yield Text(f"  {one.name:44} {_ratio(one)}")
    for one in recipe.baselines:
        yield Text(f"  {'over ' + one.name:44} {_ratio(one)}")
    yield Text.assemble(("\nrecipe: ", "bold"), _sentence(recipe))
    yield Text(recipe.summary, "green")


def line(trial: Trial) -> Text:
    """Return a trial in one line."""
    rate = f"{format.number(trial.max_rate_per_s)}/s" if trial.max_rate_per_s else ""
    told = Text.assemble(f"{trial.number:4}  ", (f"{trial.outcome:16}", _STYLES[trial.outcome]), f"{rate:>8}  ")
    return told.append(" ".join(trial.settings.values())).append(f"  {trial.reason}", "dim")


def trials(found: Sequence[Trial], *, most: int | None = None) -> Table:
    """Return the trials that were started, or the last of them; the best is bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for head in ("", "outcome", "knee", "expected", "settings", "why"):
        table.add_column(head, justify="right" if head in ("", "knee", "expected") else "left", overflow="ellipsis")
    started = [one for one in found if one.outcome != "ruled out"]
    first = best(started)
    shown = started if most is None else started[-most:]
    for one in [first, *shown] if first and first not in shown else shown:
        expected = one.expected_per_s
        table.add_row(
            str(one.number),
            Text(one.outcome, _STYLES[one.outcome]),
            f"{format.number(one.max_rate_per_s)}/s" if one.max_rate_per_s else "",
            f"{format.number(expected.value)}/s" if expected else "",
            " ".join(one.settings.values()),
            one.reason[:80],
            style="bold" if one is first else "",
        )
    return table


def _ratio(one: BaselineComparison) -> str:
    if one.ratio is None:
        return one.why or ("keeps the SLO at no rate" if one.max_rate_per_s is None else "")
    return f"{one.ratio.value:.2f} [{one.ratio.low:.2f}, {one.ratio.high:.2f}]"


def _sentence(recipe: Recipe) -> str:
    promise = recipe.promise
    bounds = ", ".join(
        f"{metric.upper()} p{share * 100:g} below {format.seconds(limit)}"
        for metric, share, limit in promise.slo.bounds()
    )
    floor = f" and the floor '{promise.quality.name or 'given'}'" if promise.quality else ""
    return (
        f"{_short(recipe.settings)} keeps {bounds}{floor} at {format.number(promise.rate_per_s)}/s "
        f"for {recipe.usd_per_1m_tokens:.3g} $ per 1M tokens"
    )


def page(study: Study, recipe: Recipe, blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the study as one self-contained page; `blocks` are the notes of the finals."""
    title = f"Recipe for {study.name}"
    head = f"<header><h1>{escape(title)}</h1><p>{escape(_sentence(recipe))}.</p>"
    head += f"<p class='banner good'><b>Proven.</b> {escape(recipe.summary)}.</p></header>"
    charts = [_pareto(study), _waterfall(recipe), *_against_load(recipe, blocks)]
    parts = [
        head,
        f"<section class='charts'>{''.join(charts)}</section>",
        _defaults(recipe),
        _drafts(study),
        _tried(study),
        _region(recipe),
    ]
    documents = f"<pre>{escape(recipe.workload.to_text())}</pre><pre>{escape(recipe.promise.slo.to_text())}</pre>"
    if recipe.promise.quality:
        documents += f"<pre>{escape(recipe.promise.quality.to_text())}</pre>"
    parts.append(f"<section><h2>The command</h2><pre>{escape(recipe.command)}</pre>")
    parts.append(f"<details><summary>Workload, SLO and floor</summary>{documents}</details></section>")
    return html.page(title, "".join(parts))


def _pareto(study: Study) -> str:
    """Every started trial: what a dollar buys, against how far its answers are from the reference's."""
    points = [one for one in study.trials if one.value and one.kl is not None]
    if len(points) < 2:
        return ""
    most = max(one.kl or 0.0 for one in points)
    limit = study.quality.fidelity.get("kl_mean") if study.quality else None
    far = 1.1 * max(most, limit.limit if limit else 0.0)
    high = 1.1 * max(one.value for one in points)
    spans = (-0.03 * far, far), (0.0, high)
    labels = ("What a dollar buys", "KL divergence from the reference", "requests for a dollar")
    chart = Chart(*labels, *spans, y_text=lambda value: f"{value / 1000:g}k")
    for name, css in (("keeps both promises", _COLOURS[0]), ("does not", _COLOURS[1])):
        chart.legend.append((name, css))
    for one in points:
        css = _COLOURS[0] if one.outcome == "feasible" else _COLOURS[1]
        said = f"{', '.join(one.settings.values())}: {one.outcome} {one.reason}"
        chart.dots([(one.kl or 0.0, one.value, one.value, one.value, said)], css)
    if limit:
        chart.upright(limit.limit, "floor")
    return f"<figure>{chart.render()}</figure>"


def _waterfall(recipe: Recipe) -> str:
    """How many times the load without it each lever makes of it."""
    shown = [(one.name, one.ratio, _ratio(one)) for one in recipe.ablation]
    return html.bars("What each lever brought: times the load without it", shown) if shown else ""


def _against_load(recipe: Recipe, blocks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each bound of the SLO against the load, for everyone in the finals."""
    for metric, share, limit in recipe.promise.slo.bounds():
        bound, by_name = f"{metric} p{share * 100:g}", dict[str, list[tuple[float, float]]]()
        for block in blocks:
            name = "the recipe" if block["settings"] == recipe.settings else str(block["name"])
            name = name if name == "the recipe" or name.endswith("as it comes") else "the runner-up"
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
        chart.across(limit, f"SLO {format.seconds(limit)}")
        yield f"<figure>{chart.render()}</figure>"


def _defaults(recipe: Recipe) -> str:
    def known(one: BaselineComparison) -> str:
        if one.max_rate_per_s:
            return f"{format.number(one.max_rate_per_s)}/s"
        return "not measured" if one.why else "at no rate"

    rows = [[escape(one.name), known(one), escape(_ratio(one))] for one in recipe.baselines]
    heads = ["baselines", "keeps the SLO up to", "the recipe carries so many times that"]
    return (
        f"<section><h2>Against the engines as they come</h2>{html.table(heads, rows, css='left')}</section>"
        if rows
        else ""
    )


def _tried(study: Study) -> str:
    rows = []
    for one in sorted(study.trials, key=lambda trial: -trial.value):
        expected = f"{format.number(one.expected_per_s.value)}/s" if one.expected_per_s else ""
        rate = f"{format.number(one.max_rate_per_s)}/s" if one.max_rate_per_s else ""
        rows.append([str(one.number), f"<b class='{_CSS[one.outcome]}'>{one.outcome}</b>", rate, expected,
                     escape(_short(one.settings)), escape(one.reason), f"{one.seconds:.0f} s"])  # fmt: skip
    heads = ["", "outcome", "knee", "expected", "settings", "why", ""]
    return f"<section><h2>Everything that was tried</h2>{html.table(heads, rows, css='left')}</section>"


def _drafts(study: Study) -> str:
    """What guessing tokens brought on the workload's own texts, by how many are answered at once."""
    crowds = sorted({one.users for one in study.drafts})
    found = {(one.engine, one.setting, one.users): one for one in study.drafts}
    rows = []
    for engine, setting in dict.fromkeys((one.engine, one.setting) for one in study.drafts):
        row = [escape(engine), escape(setting)]
        for users in crowds:
            one = found.get((engine, setting, users))
            accepted = f", {one.accepted:.0%} accepted" if one and one.accepted is not None else ""
            row.append(f"{format.number(one.tokens_per_s)}/s{accepted}" if one else "")
        rows.append(row)
    heads = ["engine", "drafts", *(f"tokens, {users} at once" for users in crowds)]
    return f"<section><h2>What drafts bring</h2>{html.table(heads, rows, css='left')}</section>" if rows else ""


def _short(settings: Settings) -> str:
    return ", ".join(f"{name} {setting}" for name, setting in settings.items())


def _region(recipe: Recipe) -> str:
    rows = [
        [escape(name.replace("_", " ")), f"{one.low:.3g} to {one.high:.3g}"] for name, one in recipe.validity.items()
    ]
    return f"<section><h2>Where it was proven</h2>{html.table(['of the traffic', ''], rows, css='left')}</section>"


_UNTOLD = ("name", "summary", "evidence", "provenance", "command", "ablation", "baselines")


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return what two recipes differ in, by its path; not what follows from it."""
    sides = [dict(_leaves({key: value for key, value in recipe.to_data(units=True).items() if key not in _UNTOLD}))
             for recipe in (one, other)]  # fmt: skip
    paths = dict.fromkeys([*sides[0], *sides[1]])
    pairs = {path: (sides[0].get(path), sides[1].get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, held in value.items():
            yield from _leaves(held, f"{path}.{key}" if path else key)
    else:
        yield path, value
