"""Render for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from powerband.core.comparison import Comparison
from powerband.core.measurement import Level, Measurement
from powerband.reports import format


def measurement(found: Measurement, *, force: bool = False) -> Iterator[RenderableType]:
    """Return the tables of a measurement, one after another; `force` shows the numbers of invalid levels."""
    yield _levels(found, force=force)
    level = found.answer
    if level is None:
        yield Text("no load keeps the SLO", "bold red")
        return
    if found.best is not None:
        goodput = f", goodput {format.rate(level.goodput_per_s)}" if level.goodput_per_s else ""
        cost = level.cost_per_1m_output_tokens
        priced = f", {cost:.3g} per 1M output tokens" if cost is not None else ""
        yield Text.assemble(("best: ", "bold"), f"{level.load} keeps the SLO{goodput}{priced}")
    yield _latencies(level)
    yield _verdicts(level)


def _levels(found: Measurement, *, force: bool) -> Table:
    table = Table(title=f"{found.name}: {found.workload.name or 'workload'}, {found.profile}", title_justify="left")
    columns = (("ttft", "p50"), ("ttft", found.promised("ttft")), ("itl", "p95"), ("tpot", found.promised("tpot")))
    told = [f"{metric.upper()} {name}" for metric, name in columns]
    for heading in ("load", "requests", *told, "out tok/s", "within SLO", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for number, level in enumerate(found.levels):
        cells = [level.load, str(level.requests)]
        for metric, name in columns:
            one = level.latencies.get(metric)
            cells.append(format.seconds(one.percentiles[name].value) if one and name in one.percentiles else "-")
        cells += [format.number(level.output_tokens_per_s)]
        cells += [f"{level.attainment.value:.1%}" if level.attainment else "-"]
        if not (level.valid or force):
            cells[2:] = ["-"] * len(cells[2:])
        style = "bold" if number == found.best else "" if level.valid else "dim"
        table.add_row(*cells, level.verdict, style=style)
    return table


def _latencies(level: Level) -> Table:
    table = Table(title=f"at {level.load}, 95 % intervals", title_justify="left")
    names = list(dict.fromkeys(name for one in level.latencies.values() for name in one.percentiles))
    for heading in ("", "mean", *names):
        table.add_column(heading, justify="left" if not heading else "right")
    for metric, one in level.latencies.items():
        cells = [format.ranged(one.percentiles[name]) if name in one.percentiles else "-" for name in names]
        table.add_row(metric.upper(), format.ranged(one.mean), *cells)
        if beside := level.expected.get(metric):
            cells = [format.ranged(beside[name]) if name in beside else "-" for name in names]
            table.add_row("  planned", "", *cells, style="dim")
    for promise in level.slo_checks:
        kept = f"{promise.metric.upper()} {promise.percentile} < {format.seconds(promise.limit_s)}"
        table.caption = (f"{table.caption}\n" if table.caption else "") + (
            f"{kept}: {format.share(promise.share)} within, {promise.verdict}"
        )
    table.caption_justify = "left"
    return table


def _verdicts(level: Level) -> Text:
    if level.valid:
        return Text(f"{len(level.verdicts)} guards looked, none objects", "green")
    text = Text()
    for one in level.refused:
        text.append(f"INVALID {one.guard}: ", "bold red").append(escape(one.sentence)).append(f"; {one.hint}\n", "dim")
    return text


def comparison(found: Comparison) -> Iterator[RenderableType]:
    """Return what `diff` says: what differs besides the numbers, then the numbers."""
    for obstacle in found.obstacles:
        yield Text.assemble(("NOT COMPARABLE ", "bold red"), obstacle)
    for note in found.notes:
        yield Text.assemble(("differs: ", "dim"), note)
    table = Table()
    for heading in ("load", "", "first", "second", "second / first", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found.differences:
        ratio = f"{one.ratio.value:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]"
        style = {"slower": "red", "faster": "green"}.get(one.says, "")
        name = f"{one.metric.upper()} {one.percentile}"
        table.add_row(
            one.load, name, format.seconds(one.first_s), format.seconds(one.second_s), ratio, one.says, style=style
        )
    yield table
    changed = [f"{one.metric.upper()} {one.percentile} {one.says}" for one in found.differences if one.says != "same"]
    yield Text("different: " + ", ".join(changed), "bold") if changed else Text("no difference beyond doubt", "bold")
