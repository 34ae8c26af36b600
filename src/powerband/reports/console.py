"""Render measurements and comparisons for a terminal."""

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
    """Yield the tables of a measurement; `force` shows the numbers of invalid levels."""
    yield _levels(found, force=force)
    level = found.result_level
    if level is None:
        yield Text("no tested load meets the SLO", "bold red")
        return
    if found.best is not None:
        yield _best(found, level)
    yield _latencies(level)
    yield _verdicts(level)


def _best(found: Measurement, level: Level) -> Text:
    climbed = found.profile == "climb" and level.rate_per_s is not None
    parts = [level.load if climbed else f"{level.load} meets the SLO"]
    if level.goodput_per_s:
        parts.append(f"goodput {format.rate(level.goodput_per_s)}")
    if level.cost_per_1m_tokens is not None:
        parts.append(f"{level.cost_per_1m_tokens:.3g} $ per 1M tokens (input and output)")
    if level.cost_per_1m_output_tokens is not None:
        parts.append(f"{level.cost_per_1m_output_tokens:.3g} $ per 1M output tokens")
    return Text.assemble(("max rate within SLO: " if climbed else "best: ", "bold"), ", ".join(parts))


def _levels(found: Measurement, *, force: bool) -> Table:
    table = _table(f"{found.name}: {found.workload.name or 'workload'}, {found.profile}")
    columns = [(metric, found.slo_percentile(metric)) for metric in ("ttft", "tpot")]
    latencies = [f"{metric.upper()} {name}" for metric, name in columns]
    for heading in ("load", "requests", *latencies, "out tok/s", "within SLO", ""):
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
    """Return three percentiles of each latency with their intervals; the report has all of them."""
    table = _table(f"at {level.load}, 95 % intervals")
    bounded = {one.percentile for one in level.slo_checks}
    names = sorted({"p50", *(bounded or {"p95"}), "p99"}, key=lambda name: float(name[1:]))
    for heading in ("", *names):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for metric, one in level.latencies.items():
        cells = [format.ranged(one.percentiles[name]) if name in one.percentiles else "-" for name in names]
        table.add_row(metric.upper(), *cells)
        if expected := level.expected.get(metric):
            cells = [format.ranged(expected[name]) if name in expected else "-" for name in names]
            table.add_row("  planned", *cells, style="dim")
    lines = [
        f"{one.metric.upper()} {one.percentile} < {format.seconds(one.limit_s)}: "
        f"{format.share(one.share)} within, {one.verdict}"
        for one in level.slo_checks
    ]
    table.caption = Text("\n".join(lines)) if lines else None
    table.caption_justify = "left"
    return table


def _table(title: str | None = None) -> Table:
    """Return an empty table without borders."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def _verdicts(level: Level) -> Text:
    if level.valid:
        return Text(f"all {len(level.verdicts)} guards passed", "green")
    text = Text()
    for one in level.failed_guards:
        text.append(f"INVALID {one.guard}: ", "bold red").append(escape(one.sentence)).append(f"; {one.hint}\n", "dim")
    return text


def comparison(found: Comparison) -> Iterator[RenderableType]:
    """Yield the result of `diff`: obstacles, differences in provenance, then the percentiles."""
    for obstacle in found.obstacles:
        yield Text.assemble(("NOT COMPARABLE ", "bold red"), obstacle)
    for note in found.notes:
        yield Text.assemble(("differs: ", "dim"), note)
    table = _table()
    for heading in ("load", "", "first", "second", "second / first", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found.differences:
        ratio = f"{one.ratio.value:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]"
        style = {"slower": "red", "faster": "green"}.get(one.verdict, "")
        name = f"{one.metric.upper()} {one.percentile}"
        table.add_row(
            one.load, name, format.seconds(one.first_s), format.seconds(one.second_s), ratio, one.verdict, style=style
        )
    yield table
    changed = [
        f"{one.metric.upper()} {one.percentile} {one.verdict}" for one in found.differences if one.verdict != "same"
    ]
    yield Text("different: " + ", ".join(changed), "bold") if changed else Text("no significant difference", "bold")
