"""Render an evaluation, for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.evaluation import Evaluation, Figure
from powerband.core.quality import FIDELITY
from powerband.reports import html

_STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow"}
_CSS = {"pass": "good", "fail": "bad", "undecided": "quiet"}


def tables(found: Evaluation) -> Iterator[RenderableType]:
    """Return the verdict and the figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    kinds = sorted({one.kind for one in found.figures if one.kind})
    for head in ("", "all", "floor", "", *kinds):
        table.add_column(head, justify="left" if not head else "right")
    for one in found.figures:
        if one.kind:
            continue
        by_kind = {other.kind: other for other in found.figures if other.name == one.name and other.kind}
        cells = [f"{by_kind[kind].found.value:.3g}" if kind in by_kind else "" for kind in kinds]
        judgement = Text(one.judgement or "", _STYLES.get(one.judgement or "", ""))
        table.add_row(one.name, _ranged(one), one.bound, judgement, *cells)
    yield table
    yield Text.assemble((f"{found.verdict}: ", _STYLES[found.verdict]), found.reason)
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in found.engine_s.items())
    early = "; stopped as soon as it was clear" if found.stopped_early else ""
    yield Text(f"engine time: {seconds}{early}", "dim")


def _ranged(one: Figure) -> str:
    return f"{one.found.value:.3g} [{one.found.low:.3g}, {one.found.high:.3g}]"


def page(found: Evaluation) -> str:
    """Return the evaluation as one self-contained page."""
    title = f"{found.candidate} against {found.reference}"
    banner = {"pass": "good", "fail": "bad"}.get(found.verdict, "")
    head = f"<header><h1>{escape(title)}</h1><p class='banner {banner}'><b>{found.verdict.capitalize()}.</b> "
    parts = [head + f"{escape(found.reason)}.</p></header>", _figures(found), _worst(found)]
    floor = f"<pre>{escape(found.floor.to_text())}</pre>"
    parts.append(f"<section><details><summary>The floor</summary>{floor}</details></section>")
    return html.page(title, "".join(parts))


def _figures(found: Evaluation) -> str:
    rows = []
    for one in found.figures:
        name = escape(one.name if not one.kind else f"… {one.kind}")
        means = escape(FIDELITY.get(one.name, ""))
        judgement = f"<b class='{_CSS[one.judgement]}'>{one.judgement}</b>" if one.judgement else ""
        rows.append(
            [f"<abbr title='{means}'>{name}</abbr>", _ranged(one), str(one.samples), escape(one.bound), judgement]
        )
    heads = ["", "found", "samples", "floor", ""]
    told = "<p class='quiet'>Brackets are intervals over whole texts, answers or questions, in pairs.</p>"
    return f"<section><h2>Against the reference</h2>{html.table(heads, rows, css='left')}{told}</section>"


def _worst(found: Evaluation) -> str:
    if not found.worst:
        return (
            "<section><h2>Answers</h2><p>No answer left the reference's way where it saw a clear choice.</p></section>"
        )
    rows = [[escape(cell) for cell in (one.kind, one.question, one.reference, one.candidate)] for one in found.worst]
    heads = ["", "question", "the reference says", "the candidate says"]
    return f"<section><h2>The worst answers, side by side</h2>{html.table(heads, rows, css='left')}</section>"
