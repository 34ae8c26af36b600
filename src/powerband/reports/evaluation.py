"""Render an evaluation as terminal tables and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.evaluation import Evaluation, Figure
from powerband.core.quality import FIDELITY
from powerband.core.statistics import UNBOUNDED
from powerband.reports import html
from powerband.reports.svg import Chart

_STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow"}
_CSS = {"pass": "good", "fail": "bad", "undecided": "unsure"}
_CHART_TITLES = {
    "kl_mean": "KL divergence of the next token",
    "top1_agreement": "Agreement on the most likely token",
    "perplexity_ratio": "Perplexity relative to the reference",
    "diverged": "Answers that diverge from the reference",
}


def tables(found: Evaluation) -> Iterator[RenderableType]:
    """Yield the table of figures, the verdict with its reason, and the engine time."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("", "all", "floor", "", *_kinds(found)):
        table.add_column(head, justify="left" if not head else "right")
    for one, cells in _rows(found):
        judgement = Text(one.judgement or "", _STYLES.get(one.judgement or "", ""))
        table.add_row(one.name, _ranged(one), one.bound, judgement, *cells)
    yield table
    yield Text.assemble((f"{found.verdict}: ", _STYLES[found.verdict]), found.reason)
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found.engine_s.items())
    early = "; stopped early because the verdict was clear" if found.stopped_early else ""
    yield Text(f"engine time: {seconds}{early}", "dim")


def _kinds(found: Evaluation) -> list[str]:
    return sorted({one.kind for one in found.figures if one.kind})


def _rows(found: Evaluation) -> Iterator[tuple[Figure, list[str]]]:
    """Yield each figure over all texts, with its values for each class of text."""
    for one in found.figures:
        if not one.kind:
            by_kind = {other.kind: f"{other.found.value:.3g}" for other in found.figures if other.name == one.name}
            yield one, [by_kind.get(kind, "") for kind in _kinds(found)]


def _ranged(one: Figure) -> str:
    low, high = one.found.low, one.found.high
    return f"{one.found.value:.3g} " + (f"[{low:.3g}, {high:.3g}]" if high < UNBOUNDED else "(interval unknown)")


def page(found: Evaluation) -> str:
    """Return the evaluation as one self-contained HTML page."""
    title = f"{found.candidate} compared with {found.reference}"
    banner = _CSS[found.verdict]
    head = f"<header><h1>{escape(title)}</h1><p class='banner {banner}'><b>{found.verdict.capitalize()}.</b> "
    parts = [head + f"{escape(found.reason)}.</p></header>", _charts(found), _figures(found), _worst(found)]
    floor = f"<pre>{escape(found.floor.to_text())}</pre>"
    parts.append(f"<section><details><summary>Quality floor</summary>{floor}</details></section>")
    return html.page(title, "".join(parts))


def _charts(found: Evaluation) -> str:
    """Draw each figure by class of text or kind of chat, with the floor as a line."""
    drawn = []
    for name, title in _CHART_TITLES.items():
        shown = {_category(one): one for one in found.figures if one.name.startswith(name)}
        if not shown:
            continue
        floor = next((one.bound for one in shown.values() if one.bound), "")
        limit = float(floor.split()[-1]) if floor else None
        ends = [end for one in shown.values() for end in (one.found.low, one.found.high)] + ([limit] if limit else [])
        low, high = min(ends), max(ends)
        span = {"top1_agreement": (low - 0.02, 1.0), "perplexity_ratio": (low - 0.01, high + 0.01)}.get(
            name, (0.0, 1.1 * high)
        )
        chart = Chart(title, "", "", (-0.5, len(shown) - 0.5), span, x_names=list(shown))
        points = [(number, one.found.value, one.found.low, one.found.high, f"{kind}: {_ranged(one)}")
                  for number, (kind, one) in enumerate(shown.items())]  # fmt: skip
        chart.dots(points, "first")
        if limit is not None:
            chart.horizontal_limit(limit, f"floor (all): {floor}")
        drawn.append(f"<figure>{chart.render()}</figure>")
    return f"<section><div class='charts'>{''.join(drawn)}</div></section>"


def _category(one: Figure) -> str:
    """Return the class of text or kind of chat that a figure is about."""
    return one.kind or (one.name.partition("_")[2] if one.name.startswith("diverged_") else "all")


def _figures(found: Evaluation) -> str:
    rows = []
    for one, cells in _rows(found):
        judgement = f"<b class='{_CSS[one.judgement]}'>{one.judgement}</b>" if one.judgement else ""
        name = f"<abbr title='{escape(FIDELITY.get(one.name, ''))}'>{escape(one.name)}</abbr>"
        rows.append([name, _ranged(one), str(one.samples), escape(one.bound), judgement, *cells])
    heads = ["", "value", "samples", "floor", "", *_kinds(found)]
    note = (
        f"<p class='quiet'>Brackets are {100 * found.level:.4g} % confidence intervals of paired samples. The verdict "
    )
    note += "is checked several times; all checks together err at most as often as one at 95 %.</p>"
    return f"<section><h2>Comparison with the reference</h2>{html.table(heads, rows, css='left')}{note}</section>"


def _worst(found: Evaluation) -> str:
    if not found.worst:
        return (
            "<section><h2>Answers</h2><p>No answer diverges from the reference where the reference clearly prefers its "
            "own token.</p></section>"
        )
    rows = [[escape(cell) for cell in (one.kind, one.question, one.reference, one.candidate)] for one in found.worst]
    heads = ["", "question", "reference", "candidate"]
    return f"<section><h2>Degraded answers, side by side</h2>{html.table(heads, rows, css='left')}</section>"
