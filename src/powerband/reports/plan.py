"""Render a plan, for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core.plan import Candidate, Plan
from powerband.core.units import about_bytes
from powerband.reports import format, html
from powerband.reports.svg import Chart

_SHOWN = 12


def tables(found: Plan, *, why: bool = False) -> Iterator[RenderableType]:
    """Return the ranking, and with `why` what each prediction rests on and every rejection."""
    yield Text(_about(found), "dim")
    if not found.candidates:
        yield Text("nothing that was offered keeps the SLO", "bold red")
    else:
        yield _ranking(found)
        yield Text.assemble(("first choice: ", "bold"), _sentence(found, found.candidates[0]))
    if why:
        yield from _why(found)
    elif found.rejections:
        yield Text(f"{len(found.rejections)} options were ruled out; --why tells the reasons", "dim")


def _about(found: Plan) -> str:
    facts = found.facts
    active = f", {facts['active_parameters'] / 1e9:.3g}B for each token" if _is_sparse(found) else ""
    known = f", {facts['known_prompt_share']:.0%} of it known" if facts["known_prompt_share"] > 0.01 else ""
    return (
        f"{found.model}: {facts['parameters'] / 1e9:.3g}B parameters{active}; "
        f"requests of {facts['prompt_tokens']:.0f} tokens{known}, answers of {facts['output_tokens']:.0f}"
    )


def _is_sparse(found: Plan) -> bool:
    return bool(found.facts["active_parameters"] < 0.8 * found.facts["parameters"])


def _ranking(found: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    heads = ["on", "engine", "weights", "KV", "split", "req/s", "TTFT", "TPOT", "$/1M tok", "80 %"]
    if found.load_per_s:
        heads.append("need")
    for head in heads:
        table.add_column(head, justify="left" if head in ("on", "engine", "weights", "KV", "split") else "right")
    for number, one in enumerate(_different(found)):
        ttft, tpot = (max(kept.items(), key=lambda item: float(item[0][1:]))[1] for kept in (one.ttft_s, one.tpot_s))
        cost = one.usd_per_1m_tokens
        cells = [
            one.device,
            one.engine,
            one.scheme,
            one.kv_format,
            one.split.replace("1 device", "1"),
            format.number(one.goodput_per_s.value),
            format.seconds(ttft.value),
            format.seconds(tpot.value),
            f"{cost.value:.3g}",
            f"{cost.low:.2g}-{cost.high:.2g}",
        ]
        if found.load_per_s:
            cells.append(f"{one.replicas * one.devices}")
        table.add_row(*cells, style="bold" if number == 0 else "")
    return table


def _different(found: Plan) -> list[Candidate]:
    """Return the best of each device, engine and number format."""
    best: dict[tuple[str, str, str], Candidate] = {}
    for one in found.candidates:
        best.setdefault((one.device, one.engine, one.scheme), one)
    return list(best.values())[:_SHOWN]


def _sentence(found: Plan, one: Candidate) -> str:
    said = f"{one.scheme} in {one.engine} on {one.devices} x {one.device} answers {format.rate(one.goodput_per_s)}"
    said += f" for {one.usd_per_h:.3g} $/h, {one.usd_per_1m_tokens.value:.3g} $ per 1M tokens"
    if found.load_per_s:
        devices, price = one.replicas * one.devices, one.replicas * one.usd_per_h
        said += f"; {found.load_per_s:g}/s need {one.replicas} replicas, {devices} devices, {price:.3g} $/h"
    return said


def _why(found: Plan) -> Iterator[RenderableType]:
    for one in _different(found):
        memory = one.memory
        yield Text.assemble(
            (f"{one.device} {one.engine} {one.scheme} {one.kv_format} {one.split}: ", "bold"),
            f"each device of {about_bytes(memory.device)} holds {about_bytes(memory.weights)} of weights and has "
            f"{about_bytes(memory.kv_cache)} for the KV cache, room for {memory.sequences} such requests; held back by "
            f"{one.limited_by}. The times rest on {one.known}; the price is {one.priced}.",
        )
    for rejected in found.rejections:
        yield Text.assemble(
            (f"not {rejected.device} {rejected.engine} {rejected.scheme} ({rejected.what}): ", "bold"),
            f"{rejected.reason}. ",
            (f"It would take {rejected.remedy}." if rejected.remedy else "", "dim"),
        )


def page(found: Plan) -> str:
    """Return the plan as one self-contained page."""
    title = f"Plan for {found.model}"
    parts = [f"<header><h1>{escape(title)}</h1><p>{escape(_about(found))}</p>"]
    if found.candidates:
        said = _sentence(found, found.candidates[0])
        parts.append(f'<p class="banner good"><b>First choice.</b> {escape(said)}.</p></header>')
        parts.append(f"<section class='charts'>{_pareto(found.candidates)}{_costs(_different(found))}</section>")
        parts.append(_table(found))
    else:
        parts.append('<p class="banner bad"><b>Nothing fits.</b> No option keeps the SLO.</p></header>')
    parts.append(_rejected(found))
    documents = f"<pre>{escape(found.workload.to_text())}</pre><pre>{escape(found.slo.to_text())}</pre>"
    parts.append(f"<section><details><summary>Workload and SLO</summary>{documents}</details></section>")
    return html.page(title, "".join(parts))


def _pareto(candidates: Sequence[Candidate]) -> str:
    """How fast an answer flows, against how much a dollar buys; the line joins what nothing beats in both."""
    points = [(1 / one.tpot_s["p50"].value, 1 / one.usd_per_1m_tokens.value, one) for one in candidates]
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    chart = Chart(
        "What a dollar buys",
        "tokens per second that a user sees (p50)",
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
    chart.line(front, "second", label="nothing beats these")
    for x, y, one in points:
        cost = one.usd_per_1m_tokens
        chart.dots([(x, y, 1 / cost.high, 1 / cost.low, f"{one.devices} x {one.device}, {one.scheme}")], "first")
    return f"<figure>{chart.render()}</figure>"


def _costs(candidates: Sequence[Candidate]) -> str:
    """Dollars per million tokens, a bar each, with its interval."""
    shown = (
        (
            f"{one.devices} x {one.device}, {one.engine} {one.scheme}",
            one.usd_per_1m_tokens,
            f"{one.usd_per_1m_tokens.value:.3g}",
        )
        for one in candidates
    )
    return html.bars("$ per 1M tokens at the SLO", shown)


def _table(found: Plan) -> str:
    heads = ["on", "engine", "weights", "KV", "split", "requests/s", "TTFT", "TPOT", "$/1M in", "$/1M out", "KV room"]
    rows = []
    for one in found.candidates:
        ttft, tpot = (max(kept.items(), key=lambda item: float(item[0][1:]))[1] for kept in (one.ttft_s, one.tpot_s))
        cells = [f"{one.devices} x {one.device}", one.engine, one.scheme, one.kv_format, one.split]
        cells += [format.rate(one.goodput_per_s), format.ranged(ttft), format.ranged(tpot)]
        cells += [f"{one.usd_per_1m_input:.3g}", f"{one.usd_per_1m_output:.3g}", f"{one.memory.sequences} requests"]
        rows.append([escape(cell) for cell in cells])
    told = "<p class='quiet'>Brackets hold 80 % of past errors of such predictions.</p>"
    return f"<section><h2>Every option that was played</h2>{html.table(heads, rows, css='left')}{told}</section>"


def _rejected(found: Plan) -> str:
    rows = [
        [escape(cell) for cell in (one.device, one.engine, one.scheme, one.what, one.reason, one.remedy)]
        for one in found.rejections
    ]
    heads = ["on", "engine", "weights", "how", "why not", "what would help"]
    return f"<section><h2>Ruled out</h2>{html.table(heads, rows, css='left')}</section>" if rows else ""
