"""The report of a replayed trace: a table for the terminal, and a page with the load, replicas, late requests, cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from rich.table import Table

from powerband.core.scaling import ScalingRow, ScalingSpan
from powerband.reports import html
from powerband.reports.svg import Chart


def table(rows: Sequence[ScalingRow], *, usd_per_h: float) -> Table:
    """Return the table of all ways of scaling, 80 columns wide."""
    found = Table(box=None, padding=(0, 2, 0, 0))
    found.add_column("", max_width=36)
    for name in ("replica-h", "cost", "in time", "late", "starts"):
        found.add_column(name, justify="right")
    for one in rows:
        cost = f"${one.replica_hours * usd_per_h:.2f}" if usd_per_h else ""
        found.add_row(
            one.name, f"{one.replica_hours:.1f}", cost, f"{one.attainment:.1%}", str(one.late), str(one.starts)
        )
    return found


def page(
    title: str, summary: str, rows: Sequence[ScalingRow], spans: Sequence[ScalingSpan], *, usd_per_h: float
) -> str:
    """Return the page: the table, and a plot of each quantity over time."""
    price = usd_per_h or 1.0
    unit = "dollars since the start" if usd_per_h else "replica-hours since the start"
    plots = [
        _plot("Load", "requests/s", spans, lambda one: one.rate_per_s, "first"),
        _plot("Replicas, with those that start", "replicas", spans, lambda one: one.replicas, "second"),
        _plot("Late requests", "requests", spans, lambda one: float(one.late), "third"),
        _plot("Cost", unit, spans, lambda one: one.replica_hours * price, "fourth"),
    ]
    head = "".join(f"<th>{name}</th>" for name in ("", "replica-hours", "cost", "in time", "late", "starts"))
    body = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.replica_hours:.1f}</td>"
        f"<td>{f'${one.replica_hours * usd_per_h:.2f}' if usd_per_h else ''}</td>"
        f"<td>{one.attainment:.1%}</td><td>{one.late}</td><td>{one.starts}</td></tr>"
        for one in rows
    )
    figures = "".join(f"<figure>{one}</figure>" for one in plots)
    return html.page(
        title,
        f"<header><h1>{escape(title)}</h1><p>{escape(summary)}</p></header>"
        f'<div class="wide"><table><tr>{head}</tr>{body}</table></div><div class="charts">{figures}</div>'
        "<p class='quiet'>Simulated. The alternatives are chosen with hindsight, at the same attainment.</p>",
    )


def _plot(title: str, label: str, spans: Sequence[ScalingSpan], value: Callable[[ScalingSpan], float], css: str) -> str:
    unit_s, unit = (3600.0, "hours") if spans[-1].at_s > 7200 else (60.0, "minutes")
    top = max(1e-9, *map(value, spans)) * 1.05
    chart = Chart(title, unit, label, (0.0, spans[-1].at_s / unit_s), (0.0, top))
    chart.line([(one.at_s / unit_s, value(one)) for one in spans], css)
    return chart.render()
