"""Render a plan for a terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.plan import Candidate, OfferedDevices, Plan
from powerband.core.statistics import Interval
from powerband.core.units import about_bytes
from powerband.reports import format, html
from powerband.reports.svg import Chart

_MAX_ROWS = 12
_SOURCES = 3  # of the expected quality, at most
_MAX_OFFERS = 4  # more devices than this are not listed
_UNDOCUMENTED, _ESTIMATED, _UNKNOWN = "?", "~", "evaluate"
_TEXT_COLUMNS = ("on", "engine", "weights", "KV")


def tables(found: Plan, *, why: bool = False) -> Iterator[RenderableType]:
    """Yield the ranking; with `why`, also the basis of each prediction and every rejection."""
    yield Text(_about(found), "dim")
    if 0 < len(found.offers) <= _MAX_OFFERS:
        yield Text(_offered(found.offers), "dim")
    if not found.candidates:
        yield Text("no option on the offered devices meets the SLO", "bold red")
    else:
        yield _ranking(found)
        if not found.load_per_s:
            yield Text("req/s: one replica; all/s: all offered devices; $/1M: per million tokens", "dim")
        if any(one.quality and one.quality.figures for one in found.candidates):
            yield Text("quality: expected from published and own measurements; 'powerband evaluate' proves it", "dim")
        if marks := _marks(_best_of_each(found)):
            yield Text(marks, "dim")
        yield Text.assemble(("first choice: ", "bold"), _sentence(found, found.candidates[0]))
    if why:
        yield from _why(found)
    elif found.rejections:
        count = len(found.rejections)
        yield Text(f"{count} option{'s were' if count > 1 else ' was'} rejected; --why lists the reasons", "dim")


def _about(found: Plan) -> str:
    facts = found.facts
    active = f" ({facts['active_parameters'] / 1e9:.3g}B active)" if _is_sparse(found) else ""
    share = facts["known_prompt_share"]
    cached = f" ({share:.0%} prefix-cache hits)" if share > 0.01 else ""
    return (
        f"{found.model}: {facts['parameters'] / 1e9:.3g}B parameters{active}; "
        f"mean prompt {facts['prompt_tokens']:.0f} tokens{cached}, mean answer {facts['output_tokens']:.0f} tokens"
    )


def _is_sparse(found: Plan) -> bool:
    return bool(found.facts["active_parameters"] < 0.8 * found.facts["parameters"])


def _offered(offers: Sequence[OfferedDevices]) -> str:
    """Return the offered devices; a device that was taken for an alias is shown with the alias."""
    shown = []
    for one in offers:
        description = f" ({one.description})" if one.description else ""
        alias = f", taken for '{one.requested_as}'" if one.requested_as else ""
        shown.append(f"{one.count} x {one.device}{description}{alias}")
    return f"devices: {'; '.join(shown)}"


def _ranking(found: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    together = "need" if found.load_per_s else "all/s"
    for head in (*_TEXT_COLUMNS, "req/s", "TPOT", "$/1M", "80 %", together, "quality"):
        table.add_column(head, justify="left" if head in _TEXT_COLUMNS else "right")
    for number, one in enumerate(_best_of_each(found)):
        tpot, cost = _strictest(one.tpot_s), one.usd_per_1m_tokens
        together = format.number(one.fleet_per_s.value) if one.fleet_per_s else ""
        cells = [
            one.device if one.devices == 1 else f"{one.device} {one.split}",
            one.engine,
            one.scheme if one.documented else f"{one.scheme} {_UNDOCUMENTED}",
            one.kv_format,
            format.number(one.goodput_per_s.value),
            f"{tpot.value * 1e3:.0f} ms",
            f"{_ESTIMATED * one.price_estimated}{_short(cost.value)}",
            f"{_short(cost.low)}-{_short(cost.high)}",
            f"{one.replicas * one.devices}" if found.load_per_s else together,
            _quality(one),
        ]
        table.add_row(*cells, style="bold" if number == 0 else "")
    return table


def _quality(one: Candidate) -> str:
    """Return the expected quality in a few letters."""
    if one.quality is None or one.quality.outlook == "not quantized":
        return ""
    found = {figure.unit: figure.expected.value for figure in one.quality.figures}
    for unit in ("recovery", "same-top"):
        if unit in found:
            return f"{100 * found[unit]:.3g}%"
    return f"KL {_short(found['mean-kl'])}" if "mean-kl" in found else _UNKNOWN


def _short(value: float) -> str:
    """Return a number with two digits, without a leading zero: columns are narrow."""
    return f"{value:.2g}".removeprefix("0") or "0"


def _evidence(one: Candidate) -> str:
    """Return what is known of the quality, and where."""
    quality = one.quality
    if quality is None or quality.outlook == "not quantized":
        return "Quality: not quantized."
    if not quality.figures:
        return "Quality: nothing is published; evaluate it."
    figures = "; ".join(figure.text for figure in quality.figures)
    outlook = {"likely": ", likely within the floor", "uncertain": ", perhaps below the floor"}.get(quality.outlook, "")
    warnings = "".join(f" Warning: {warning}." for warning in quality.warnings)
    more = f"; {len(quality.sources) - _SOURCES} more" if len(quality.sources) > _SOURCES else ""
    listed = f"{'; '.join(quality.sources[:_SOURCES])}{more}"
    return f"Quality{outlook}: {figures}; from {quality.likeness} ({listed}).{warnings}"


def _marks(shown: Sequence[Candidate]) -> str:
    """Return what the marks in the table mean."""
    undocumented = f"{_UNDOCUMENTED}: not documented for this device" * any(not one.documented for one in shown)
    estimated = f"{_ESTIMATED}: Powerband estimated the price; give yours with --price" * any(
        one.price_estimated for one in shown
    )
    return "; ".join(filter(None, (undocumented, estimated)))


def _strictest(percentiles: dict[str, Interval]) -> Interval:
    """Return the value at the highest percentile."""
    return max(percentiles.items(), key=lambda item: float(item[0][1:]))[1]


def _best_of_each(found: Plan) -> list[Candidate]:
    """Return the best candidate of each device, engine and quantization scheme."""
    best: dict[tuple[str, str, str], Candidate] = {}
    for one in found.candidates:
        best.setdefault((one.device, one.engine, one.scheme), one)
    return list(best.values())[:_MAX_ROWS]


def _sentence(found: Plan, one: Candidate) -> str:
    text = f"{one.engine} with {one.scheme} weights on {one.devices} x {one.device}"
    text += f" sustains {format.rate(one.goodput_per_s)} within the SLO"
    price = f"an estimated {one.usd_per_h:.3g}" if one.price_estimated else f"{one.usd_per_h:.3g}"
    text += f" for {price} $/h, {one.usd_per_1m_tokens.value:.3g} $ per 1M tokens"
    if found.load_per_s:
        devices, together = one.replicas * one.devices, one.replicas * one.usd_per_h
        replicas, on = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((one.replicas, "replica"), (devices, "device")))
        text += f"; {found.load_per_s:g}/s need {replicas}, {on}, {together:.3g} $/h"
    elif one.fleet_per_s and one.fleet_replicas and one.fleet_replicas > 1:
        rate = format.rate(one.fleet_per_s)
        text += f"; all offered {one.device} together: {one.fleet_replicas} replicas, {rate}"
        text += f" for {one.fleet_usd_per_h:.3g} $/h"
    return text


def _why(found: Plan) -> Iterator[RenderableType]:
    for one in _best_of_each(found):
        memory = one.memory
        yield Text.assemble(
            (
                f"{one.device}  {one.engine}  weights={one.scheme}  kv={one.kv_format}  split={one.split}: ",
                "bold",
            ),
            f"each device has {about_bytes(memory.device)}: {about_bytes(memory.weights)} of weights and "
            f"{about_bytes(memory.kv_cache)} of KV cache, enough for {memory.sequences} requests of mean length; "
            f"limited by {one.limited_by}. Times: {one.basis}. Price: {one.price_source}. "
            f"{'; '.join(one.support)}. {_evidence(one)}",
        )
    for rejected in found.rejections:
        yield Text.assemble(
            (
                f"rejected: {rejected.device}  {rejected.engine}  weights={rejected.scheme} ({rejected.what}): ",
                "bold",
            ),
            f"{rejected.reason}. ",
            (f"Use {rejected.remedy}." if rejected.remedy else "", "dim"),
        )


def page(found: Plan) -> str:
    """Return the plan as one self-contained page."""
    title = f"Plan for {found.model}"
    offered = f"<p>{escape(_offered(found.offers))}</p>" if 0 < len(found.offers) <= _MAX_OFFERS else ""
    parts = [f"<header><h1>{escape(title)}</h1><p>{escape(_about(found))}</p>{offered}"]
    if found.candidates:
        sentence = _sentence(found, found.candidates[0])
        parts.append(f'<p class="banner good"><b>First choice.</b> {escape(sentence)}.</p></header>')
        parts.append(f"<section class='charts'>{_pareto(found.candidates)}{_costs(_best_of_each(found))}</section>")
        parts.append(_table(found))
    else:
        parts.append(
            '<p class="banner bad"><b>No option.</b> No option on the offered devices meets the SLO.</p></header>'
        )
    parts.append(_rejected(found))
    documents = f"<pre>{escape(found.workload.to_text())}</pre><pre>{escape(found.slo.to_text())}</pre>"
    parts.append(f"<section><details><summary>Workload and SLO</summary>{documents}</details></section>")
    return html.page(title, "".join(parts))


def _pareto(candidates: Sequence[Candidate]) -> str:
    """Return a chart of speed against cost with the Pareto front."""
    points = [(1 / one.tpot_s["p50"].value, 1 / one.usd_per_1m_tokens.value, one) for one in candidates]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    chart = Chart(
        "Speed and cost",
        "tokens per second of one request (p50)",
        "million tokens per dollar",
        (min(xs) / 1.2, max(xs) * 1.2),
        (min(ys) / 1.5, max(ys) * 1.5),
        log_x=max(xs) / min(xs) > 5,
        log_y=max(ys) / min(ys) > 5,
    )
    front, best = [], 0.0
    for x, y, _ in sorted(points, key=lambda point: -point[0]):
        if y > best:
            front.append((x, y))
            best = y
    chart.line(front, "second", label="Pareto front")
    for x, y, one in points:
        cost = one.usd_per_1m_tokens
        chart.dots([(x, y, 1 / cost.high, 1 / cost.low, f"{one.devices} x {one.device}, {one.scheme}")], "first")
    return f"<figure>{chart.render()}</figure>"


def _costs(candidates: Sequence[Candidate]) -> str:
    """Return a bar chart of dollars per million tokens, with intervals."""
    shown = (
        (
            f"{one.devices} x {one.device}, {one.engine} {one.scheme}",
            one.usd_per_1m_tokens,
            f"{one.usd_per_1m_tokens.value:.3g}",
        )
        for one in candidates
    )
    return html.bars("$ per 1M tokens at the highest rate within the SLO", shown)


def _fleet(one: Candidate) -> list[str]:
    """Return the replicas on all offered devices, their total rate and their price per hour."""
    if one.fleet_replicas is None or one.fleet_per_s is None or one.fleet_usd_per_h is None:
        return ["", "", ""]  # a plan of an earlier version
    return [f"{one.fleet_replicas}", format.number(one.fleet_per_s.value), f"{one.fleet_usd_per_h:.3g}"]


def _table(found: Plan) -> str:
    heads = [*_TEXT_COLUMNS, "split", "requests/s", "TTFT", "TPOT", "$/1M in", "$/1M out", "KV capacity"]
    heads += [] if found.load_per_s else ["replicas that fit", "requests/s of all", "$/h of all"]
    rows = []
    for one in found.candidates:
        ttft, tpot = _strictest(one.ttft_s), _strictest(one.tpot_s)
        cells = [f"{one.devices} x {one.device}", one.engine, one.scheme, one.kv_format, one.split]
        cells += [format.rate(one.goodput_per_s), format.ranged(ttft), format.ranged(tpot)]
        cells += [f"{one.usd_per_1m_input:.3g}", f"{one.usd_per_1m_output:.3g}", f"{one.memory.sequences} requests"]
        cells += [] if found.load_per_s else _fleet(one)
        rows.append([escape(cell) for cell in cells])
    note = "<p class='quiet'>Brackets: intervals that cover 80 % of past prediction errors.</p>"
    return f"<section><h2>Simulated options</h2>{html.table(heads, rows, css='left')}{note}</section>"


def _rejected(found: Plan) -> str:
    rows = [
        [escape(cell) for cell in (one.device, one.engine, one.scheme, one.what, one.reason, one.remedy)]
        for one in found.rejections
    ]
    heads = ["on", "engine", "weights", "KV and split", "reason", "remedy"]
    return f"<section><h2>Rejected options</h2>{html.table(heads, rows, css='left')}</section>" if rows else ""
