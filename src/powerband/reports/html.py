"""Render a measurement as one self-contained HTML page, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from powerband import metrics
from powerband.core.measurement import GRID, Level, Measurement
from powerband.core.statistics import Interval
from powerband.reports import format
from powerband.reports.svg import Chart


def measurement(found: Measurement) -> str:
    """Return the report of a measurement."""
    level = found.result_level or (found.levels[-1] if found.levels else None)
    title = f"{found.name}: {found.workload.name or 'workload'}"
    parts = [_head(found, title)]
    if level is not None:
        parts += [_cards(found, level), _charts(found, level), _percentiles(level)]
        parts += [_levels(found) if len(found.levels) > 1 else "", _guards(level), _crosschecks(level)]
    parts.append(_provenance(found))
    return page(title, "".join(parts))


def page(title: str, body: str) -> str:
    """Return the HTML page of a report body."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(found: Measurement, title: str) -> str:
    origin = found.provenance
    machine = origin.get("machine", {})
    devices = ", ".join(machine.get("gpus") or ()) or f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    kinds = {"level": "one level", "sweep": "a sweep over rates", "climb": "max rate within SLO"}
    line = f"{origin.get('engine', '')} {origin.get('engine_version', '')} on {devices} · {kinds[found.profile]}"
    line += f" · {origin.get('measured_at', '')[:16].replace('T', ' ')} UTC"
    heading, css, text = _verdict(found)
    description = f"<p class='quiet'>{escape(found.workload.description)}</p>" if found.workload.description else ""
    return (
        f"<header><h1>{escape(title)}</h1><p>{escape(line)}</p>{description}"
        f'<p class="banner {css}"><b>{heading}</b> {escape(text)}</p></header>'
    )


def _verdict(found: Measurement) -> tuple[str, str, str]:
    cut = " Interrupted: only what was measured until then is included." if found.interrupted else ""
    if found.best is not None and found.valid:
        level = found.levels[found.best]
        certain = all(one.verdict == "met" for one in level.slo_checks)
        note = "" if certain else " (the 95 % interval includes a miss)"
        text = f"{level.load} is the highest measured load that meets the SLO{note}."
        if found.profile == "level":
            text = f"{level.load} meets the SLO{note}."
        return "SLO met.", "good", text + cut
    if found.valid and found.slo is None:
        passed = all(level.valid for level in found.levels)
        return "Valid.", "good", ("All guards passed." if passed else "Levels with failed guards are marked.") + cut
    if found.valid:
        return "SLO missed.", "bad", "The measurement is valid, and no measured load meets the SLO." + cut
    if found.profile == "climb" and found.levels:
        return "SLO missed.", "bad", "No measured load meets the SLO." + cut
    reasons = [one.sentence for level in found.levels for one in level.failed_guards]
    listed = "; ".join(dict.fromkeys(reasons)) or "nothing was measured"
    return "INVALID.", "bad", f"Do not use these numbers: {listed}.{cut}"


def _cards(found: Measurement, level: Level) -> str:
    cards = [("load", level.load, f"{level.requests} requests in {level.window_s:.0f} s")]
    if level.goodput_per_s:
        one = level.goodput_per_s
        cards.append(
            ("goodput", f"{format.number(one.value)}/s", f"{format.number(one.low)} to {format.number(one.high)}")
        )
    for metric in ("ttft", "tpot"):
        latency = level.latencies.get(metric)
        wanted = (found.slo_percentile(metric), "p95", "p90", "p50")
        name = next((name for name in wanted if latency and name in latency.percentiles), None)
        if latency and name:
            one = latency.percentiles[name]
            span = f"{format.seconds(one.low)} to {format.seconds(one.high)}"
            cards.append((f"{metric.upper()} {name}", format.seconds(one.value), span))
    cards.append(
        (
            "output",
            f"{format.number(level.output_tokens_per_s)} tok/s",
            f"{format.number(level.prompt_tokens_per_s)} tok/s in",
        )
    )
    if level.cost_per_1m_tokens is not None:
        cards.append(("$ per 1M tokens", f"{level.cost_per_1m_tokens:.3g}", "input and output together"))
    if level.cost_per_1m_output_tokens is not None:
        cards.append(("$ per 1M output tokens", f"{level.cost_per_1m_output_tokens:.3g}", "output tokens alone"))
    if found.startup_s:
        cards.append(("start-up", format.seconds(found.startup_s), "until the first answer"))
    inner = "".join(
        f"<div class='card'><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(detail)}</small></div>"
        for name, value, detail in cards
    )
    return f"<section class='cards'>{inner}</section>"


def _charts(found: Measurement, level: Level) -> str:
    drawn = []
    if len({one.load for one in found.levels}) > 1:
        drawn += [chart for metric in ("ttft", "tpot") if (chart := _against_load(found, metric))]
    drawn += [chart for metric in ("ttft", "itl") if (chart := _shares(found, level, metric))]
    drawn += _timelines(level)
    return "<section class='charts'>" + "".join(f"<figure>{chart.render()}</figure>" for chart in drawn) + "</section>"


def _against_load(found: Measurement, metric: str) -> Chart | None:
    """Plot latency against load, with intervals and SLO limits; the line shows the last level of each load."""
    names = ("p50", found.slo_percentile(metric))
    rows = sorted(
        (one for one in found.levels if one.valid and metric in one.latencies and one.rate_per_s),
        key=lambda one: one.rate_per_s or 0,
    )
    values = [
        one.latencies[metric].percentiles[name]
        for one in rows
        for name in names
        if name in one.latencies[metric].percentiles
    ]
    if not values:
        return None
    limits = getattr(found.slo, metric, None) or {} if found.slo else {}
    top = max([value.high for value in values] + list(limits.values())) * 1.3
    bottom = min([value.low for value in values] + list(limits.values())) / 1.3
    rates = [one.rate_per_s or 0.0 for one in rows]
    chart = Chart(
        f"{metric.upper()} against load",
        "requests per second",
        "",
        (min(rates) / 1.2, max(rates) * 1.2),
        (max(bottom, 1e-5), top),
        log_x=True,
        log_y=True,
        y_text=format.seconds,
    )
    for name, css in zip(names, ("first", "second"), strict=True):
        points = [
            (one.rate_per_s or 0.0, one.latencies[metric].percentiles[name], one)
            for one in rows
            if name in one.latencies[metric].percentiles
        ]
        chart.line(sorted({rate: value.value for rate, value, _ in points}.items()), css, label=name)
        chart.dots(
            [
                (rate, value.value, value.low, value.high, f"{one.load}: {name} {format.ranged(value)}; {one.verdict}")
                for rate, value, one in points
            ],
            css,
        )
    for name, limit in limits.items():
        chart.horizontal_limit(limit, f"SLO {name} {format.seconds(limit)}")
    return chart


def _shares(found: Measurement, level: Level, metric: str) -> Chart | None:
    """Plot the cumulative distribution of a latency."""
    latency = level.latencies.get(metric)
    if latency is None:
        return None
    points = [(max(value, 1e-6), share) for value, share in zip(latency.grid, GRID, strict=True)]
    limits = getattr(found.slo, metric, None) or {} if found.slo else {}
    low, high = points[0][0], max([points[-1][0], *(limit for limit in limits.values() if limit < 20 * points[-1][0])])
    what = "requests" if metric != "itl" else "gaps"
    chart = Chart(
        f"{metric.upper()}: {latency.count:,} {what} at {level.load}",
        "",
        f"share of {what} within",
        (low / 1.05, high * 1.1),
        (0, 1),
        log_x=high / low > 20,
        x_text=format.seconds,
        y_text=lambda value: f"{value:.0%}",
    )
    chart.line(points, "first")
    for name, one in latency.percentiles.items():
        share = float(name[1:]) / 100
        chart.dots([(one.value, share, share, share, f"{name} {format.ranged(one)}")], "first")
    for name, limit in limits.items():
        chart.vertical_limit(limit, f"SLO {name} {format.seconds(limit)}")
    return chart


def _timelines(level: Level) -> list[Chart]:
    """Plot requests in flight, queue depth and KV-cache use over time."""
    line, drawn = level.timeline, []
    if len(line.at_s) < 3:
        return []
    end = max(line.at_s)
    kinds: list[tuple[str, str, str, Sequence[float | None]]] = [
        ("in flight", "first", "client", line.in_flight),
        ("running", "second", "engine", line.running),
        ("waiting", "third", "engine", line.queue_depth),
    ]
    top = max([value for *_, values in kinds for value in values if value is not None] or [1.0])
    chart = Chart("Requests over time", "seconds", "requests", (0, end), (0, max(1.0, top * 1.1)))
    chart.shade(level.warmup_s, level.warmup_s + level.window_s / len(level.seeds))
    for name, css, _, values in kinds:
        if any(value is not None for value in values):
            chart.line(_without_gaps(line.at_s, values), css, label=name)
    drawn.append(chart)
    if any(value is not None for value in line.kv_use):
        chart = Chart("KV cache in use", "seconds", "share", (0, end), (0, 1), y_text=lambda value: f"{value:.0%}")
        chart.shade(level.warmup_s, level.warmup_s + level.window_s / len(level.seeds))
        chart.line(_without_gaps(line.at_s, line.kv_use), "first")
        drawn.append(chart)
    return drawn


def _without_gaps(at: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(at_s, value) for at_s, value in zip(at, values, strict=True) if value is not None and at_s >= 0]


def _percentiles(level: Level) -> str:
    names = list(dict.fromkeys(name for one in level.latencies.values() for name in one.percentiles))
    rows = []
    for metric, one in level.latencies.items():
        cells = [format.ranged(one.percentiles[name]) if name in one.percentiles else "too few" for name in names]
        meaning = metrics.LATENCIES[metric].description
        rows.append([f"<abbr title='{escape(meaning)}'>{metric.upper()}</abbr>", format.ranged(one.mean), *cells])
        if expected := level.expected.get(metric):
            cells = [format.ranged(expected[name]) if name in expected else "" for name in names]
            rows.append(["<span class='quiet'>planned</span>", "", *cells])
    checks = "".join(
        f"<p>{one.metric.upper()} {one.percentile} below {format.seconds(one.limit_s)}: "
        f"{format.share(one.share)} within: <b class='{_css(one.verdict)}'>{one.verdict}</b></p>"
        for one in level.slo_checks
    )
    note = "<p class='quiet'>95 % intervals in brackets; percentiles with too few samples are not shown."
    note += " Planned values have 80 % intervals.</p>" if level.expected else "</p>"
    return f"<section><h2>Latency at {level.load}</h2>{table(['', 'mean', *names], rows)}{checks}{note}</section>"


def _levels(found: Measurement) -> str:
    rows = []
    columns = (
        ("ttft", "p50"),
        ("ttft", found.slo_percentile("ttft")),
        ("tpot", found.slo_percentile("tpot")),
        ("itl", "p99"),
    )
    for number, one in enumerate(found.levels):
        cells = [one.load, str(one.requests), format.number(one.achieved_per_s)]
        for metric, name in columns:
            latency = one.latencies.get(metric)
            known = latency and name in latency.percentiles
            cells.append(format.seconds(latency.percentiles[name].value) if latency and known else "-")
        cells += [format.number(one.output_tokens_per_s), format.share(one.attainment) if one.attainment else "-"]
        if not one.valid:
            cells[2:] = ["-"] * len(cells[2:])
        verdict = escape(one.verdict)
        rows.append([*cells, f"<b class='good'>{verdict}</b>" if number == found.best else verdict])
    latencies = [f"{metric.upper()} {name}" for metric, name in columns]
    heads = ["load", "requests", "answered/s", *latencies, "out tok/s", "within SLO", ""]
    return f"<section><h2>All levels, in measured order</h2>{table(heads, rows, css='verdicts')}</section>"


def _guards(level: Level) -> str:
    rows = [
        [
            escape(one.guard),
            "<b class='good'>passed</b>" if one.valid else "<b class='bad'>failed</b>",
            escape(one.sentence) + (f" <span class='quiet'>{escape(one.hint)}</span>" if not one.valid else ""),
        ]
        for one in level.verdicts
    ]
    return f"<section><h2>Guards</h2>{table(['guard', '', 'finding'], rows, css='left')}</section>"


def _crosschecks(level: Level) -> str:
    rows = [
        [escape(one.what), format.number(one.client), format.number(one.engine), f"{one.difference:.1%}"]
        for one in level.crosschecks
    ]
    figures = [
        [escape(name.replace("_", " ")), format.number(value)]
        for name, value in {**level.engine, **level.client}.items()
    ]
    both = f"<h2>Client and engine</h2>{table(['', 'client', 'engine', 'difference'], rows)}" if rows else ""
    return f"<section>{both}<details><summary>Details</summary>{table(['', ''], figures)}</details></section>"


def _provenance(found: Measurement) -> str:
    origin = found.provenance
    command = escape(str(origin.get("command", "")))
    rows = [
        [escape(str(key).replace("_", " ")), escape(str(value))]
        for key, value in origin.items()
        if key not in ("command", "deployment") and value is not None
    ]
    workload = f"<pre>{escape(found.workload.to_text())}</pre>"
    slo = f"<pre>{escape(found.slo.to_text())}</pre>" if found.slo else ""
    return (
        f"<section><h2>Reproduce</h2><pre>{command}</pre>"
        "<details><summary>Provenance</summary>"
        f"{table(['', ''], rows, css='left')}{workload}{slo}</details></section>"
    )


def _css(verdict: str) -> str:
    return {"met": "good", "missed": "bad"}.get(verdict, "unsure")


def bars(caption: str, shown: Iterable[tuple[str, Interval | None, str]]) -> str:
    """Return a bar chart of (name, value with interval, text); no bar if the value is None."""
    rows_shown = list(shown)
    scale = 100 / max((one.high for _, one, _ in rows_shown if one), default=1.0)

    def bar(one: Interval | None) -> str:
        if one is None:
            return ""
        return (
            f"<i style='width:{one.value * scale:.1f}%'></i>"
            f"<u style='left:{one.low * scale:.1f}%;width:{(one.high - one.low) * scale:.1f}%'></u>"
        )

    rows = [
        f"<tr><td>{escape(name)}</td><td class='bar'>{bar(one)}</td><td>{escape(text)}</td></tr>"
        for name, one, text in rows_shown
    ]
    return f"<figure><table class='bars'><caption>{escape(caption)}</caption>{''.join(rows)}</table></figure>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "") -> str:
    """Return a table; its cells are HTML."""
    head = "".join(f"<th>{one}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table class='{css}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
