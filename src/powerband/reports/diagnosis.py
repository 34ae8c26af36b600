"""Render a diagnosis for a terminal and as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from html import escape

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from powerband.core.diagnosis import Diagnosis, Effect, Finding, Observation, Severity
from powerband.reports import format
from powerband.reports.html import page, table

_STYLES: dict[Severity, str] = {"problem": "bold red", "warning": "yellow", "note": "dim"}
_CSS: dict[Severity, str] = {"problem": "bad", "warning": "unsure", "note": "quiet"}
_WIDTH = 78
_HARMLESS = "Only GET requests were sent; nothing was changed. No prompts or answers were read."
Row = tuple[str, str]


def console(found: Diagnosis) -> Iterator[RenderableType]:
    """Yield the parts of a diagnosis, for 80 columns and more."""
    one = found.observation
    yield Text.assemble((found.url, "bold"), f"  {_server(one)}", (f"  {_window(found)}", "dim"))
    yield Text.assemble(("limited by: ", "bold"), f"{found.resource}; {found.resource_evidence}")
    yield ""
    yield _grid(happening(one))
    yield ""
    for number, finding in enumerate(found.findings, 1):
        yield Text.assemble((f"{number}  {finding.severity}: ", _STYLES[finding.severity]), (finding.title, "bold"))
        yield Padding(_grid(_finding(finding)), (0, 0, 1, 3))
    if not found.findings:
        yield Text("no findings", "green")
        yield ""
    if found.preliminary:
        return
    if found.changed_command:
        yield Text("changed command line (problems and warnings; nothing was changed by Powerband):", "bold")
        yield Text(broken(found.changed_command), no_wrap=True, overflow="ignore")
        yield ""
    if found.prove_command:
        yield Text("measure it before you rely on it:", "bold")
        yield Text(broken(found.prove_command), no_wrap=True, overflow="ignore")
        yield ""
    yield _grid([("read", "; ".join(found.read) or "nothing"), *(("not seen", text) for text in found.unseen)])
    yield Text(_HARMLESS, "dim")


def broken(command: str, width: int = _WIDTH) -> str:
    """Return a command line on several lines that can be pasted, broken between flags."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    groups: list[str] = []
    for word in words:
        is_value = groups and not word.startswith("-") and groups[-1].startswith("-") and " " not in groups[-1]
        if is_value:
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + len(group) + 3 > width:
            lines.append("   ")
        lines[-1] += (" " if lines[-1].strip() else "  ") + group
    return " \\\n".join(lines)


def happening(one: Observation) -> list[Row]:
    """Return what the server does, as rows of a name and a sentence."""
    rows: list[Row] = []
    traffic = []
    if one.request_rate_per_s is not None:
        traffic.append(f"{format.number(one.request_rate_per_s)} requests/s")
    if one.prompt_tokens and one.output_tokens:
        traffic.append(f"{one.prompt_tokens:.0f} + {one.output_tokens:.0f} tokens each")
    if one.cached_share is not None:
        traffic.append(f"{one.cached_share:.0%} of the prompt tokens cached")
    if one.output_tokens_per_s is not None:
        traffic.append(f"{format.number(one.output_tokens_per_s)} output tokens/s")
    if one.rejected:
        traffic.append(f"{one.rejected:.0f} rejected")
    rows.append(("traffic", ", ".join(traffic)))
    batch = []
    if one.running is not None:
        limit = f" of at most {one.sequence_limit:.0f}" if one.sequence_limit else ""
        batch.append(f"{one.running:.1f}{limit} running (peak {one.running_max:.0f})")
    if one.waiting is not None:
        batch.append(f"{one.waiting:.1f} waiting (peak {one.waiting_max:.0f})")
    if one.kv_use_max is not None:
        batch.append(f"KV cache {one.kv_use:.0%} used (peak {one.kv_use_max:.0%})")
    if one.preemptions is not None and one.preemptions:
        batch.append(f"{one.preemptions:.0f} preemptions")
    rows.append(("batch", ", ".join(batch)))
    rows.append(("latency", ", ".join(_latency(one))))
    if one.slo_ttft_share is not None or one.slo_tpot_share is not None:
        shares = [("TTFT", one.slo_ttft_share), ("time between tokens", one.slo_tpot_share)]
        rows.append(("SLO", ", ".join(f"{share:.0%} within the {name}" for name, share in shares if share is not None)))
    if one.acceptance is not None:
        rows.append(("speculation", f"{one.acceptance:.0%} of {one.draft_tokens:.0f} draft tokens accepted"))
    if one.memory_share is not None and one.compute_share is not None:
        text = (
            f"decoding uses {one.memory_share:.0%} of the memory bandwidth, steps {one.compute_share:.0%} of the FLOPS"
        )
        rows.append(("device", text))
    if one.cores_used is not None:
        text = f"{one.cores_used:.1f} of {one.physical_cores:.0f} cores"
        if one.background_cores is not None:
            text += f", other processes {one.background_cores:.1f}"
        if one.throttled_share:
            text += f", throttled in {one.throttled_share:.0%} of the periods"
        rows.append(("CPU", text))
    if one.gpu_name and one.gpus:
        busy = f", a kernel runs {one.gpu_busy:.0%} of the time" if one.gpu_busy is not None else ""
        rows.append(("GPU", f"{one.gpus:.0f} x {one.gpu_name}{busy}"))
    return [(name, text) for name, text in rows if text]


def _latency(one: Observation) -> list[str]:
    parts = []
    if one.ttft_s is not None:
        tail = f" (p95 about {format.seconds(one.ttft_p95_s)})" if one.ttft_p95_s is not None else ""
        parts.append(f"TTFT {format.seconds(one.ttft_s)} mean{tail}")
    if one.itl_s is not None:
        tail = f" (p99 about {format.seconds(one.itl_p99_s)})" if one.itl_p99_s is not None else ""
        parts.append(f"{format.seconds(one.itl_s)} between tokens{tail}")
    if one.queue_s is not None:
        parts.append(f"{format.seconds(one.queue_s)} in the queue")
    return parts


def effect(one: Effect) -> str:
    """Return an expected effect as text."""
    if one.factor is None:
        return f"{one.metric}: {one.basis}"
    factor = one.factor
    return f"{one.metric} x {factor.value:.2f}, between {factor.low:.2f} and {factor.high:.2f} ({one.basis})"


def _finding(one: Finding) -> list[Row]:
    return [
        ("seen", one.evidence),
        ("why", one.why),
        ("change", one.change.short),
        ("expect", effect(one.effect)),
        ("risk", one.risk),
        ("docs", one.docs),
        *([("source", one.source)] if one.source != one.docs else []),
    ]


def _server(one: Observation) -> str:
    name = (one.model or "").rstrip("/").rpartition("/")[2]
    return " ".join(filter(None, (one.engine, one.engine_version, name)))


def _window(found: Diagnosis) -> str:
    one = found.observation
    text = f"{one.readings} readings in {one.window_s:.0f} s"
    return f"preliminary: {text}" if found.preliminary else text


def _grid(rows: list[Row]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold", max_width=100)
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def html(found: Diagnosis) -> str:
    """Return the page of a diagnosis: one file, without scripts."""
    one = found.observation
    title = f"Diagnosis of {found.url}"
    counts = [f"{found.count(name)} {name}{'s' if found.count(name) != 1 else ''}" for name in _STYLES]
    worst = next((name for name in _STYLES if found.count(name)), None)
    css = {"problem": "bad", "warning": "unsure"}.get(worst or "", "good")
    head = (
        f"<header><h1>{escape(title)}</h1><p>{escape(_server(one))} · {escape(_window(found))} · "
        f"{escape(found.taken_at.replace('T', ' ').removesuffix('+00:00'))} UTC</p>"
        f'<p class="banner {css}"><b>{escape(", ".join(counts))}.</b> '
        f"Limited by: {escape(found.resource)}; {escape(found.resource_evidence)}.</p></header>"
    )
    cards = "".join(
        f"<div class='card'><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(detail)}</small></div>"
        for name, value, detail in _cards(one)
    )
    rows = [[escape(name), escape(text)] for name, text in happening(one)]
    parts = [head, f"<section class='cards'>{cards}</section>" if cards else ""]
    parts.append(f"<section><h2>Findings</h2>{_findings(found) or '<p>Nothing was found.</p>'}</section>")
    parts.append(f"<section><h2>What the server does</h2>{table(['', ''], rows, css='left')}</section>")
    parts.append(_next(found))
    lists = "".join(
        f"<h3>{heading}</h3><ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        for heading, texts in (("Read", found.read), ("Not seen", found.unseen))
        if texts
    )
    parts.append(
        f"<section><h2>What was read</h2>{lists}<p class='quiet'>Only GET requests were sent, and nothing was changed. "
        "No prompts or answers were read. Percentiles are interpolated within the buckets of the server's "
        "histograms; means are exact. Requests that did not end in the window are missing in queue and prefill "
        "times.</p></section>"
    )
    return page(title, "".join(parts))


def _cards(one: Observation) -> list[tuple[str, str, str]]:
    found = []
    if one.output_tokens_per_s is not None:
        rate = f"{format.number(one.request_rate_per_s)} requests/s" if one.request_rate_per_s is not None else ""
        found.append(("output", f"{format.number(one.output_tokens_per_s)} tok/s", rate))
    if one.running is not None:
        found.append(("running", f"{one.running:.1f}", f"{one.waiting or 0.0:.1f} waiting"))
    if one.ttft_s is not None:
        tail = f"p95 about {format.seconds(one.ttft_p95_s)}" if one.ttft_p95_s is not None else "mean"
        found.append(("TTFT", format.seconds(one.ttft_s), tail))
    if one.itl_s is not None:
        tail = f"p99 about {format.seconds(one.itl_p99_s)}" if one.itl_p99_s is not None else "mean"
        found.append(("between tokens", format.seconds(one.itl_s), tail))
    if one.kv_use_max is not None and one.kv_use is not None:
        found.append(("KV cache", f"{one.kv_use:.0%}", f"peak {one.kv_use_max:.0%}"))
    if one.cached_share is not None:
        found.append(("prompt from cache", f"{one.cached_share:.0%}", "of the prompt tokens"))
    if one.memory_share is not None:
        found.append(("memory bandwidth", f"{one.memory_share:.0%}", "used by decoding"))
    return found


def _findings(found: Diagnosis) -> str:
    parts = []
    for number, one in enumerate(found.findings, 1):
        rows = [[f"<b>{name}</b>", _linked(text)] for name, text in _finding(one)]
        rows[2][1] = f"<code>{escape(one.change.short)}</code>" if one.change.flags else escape(one.change.short)
        parts.append(
            f"<h3>{number}. <b class='{_CSS[one.severity]}'>{one.severity}</b> {escape(one.title)}</h3>"
            f"{table(['', ''], rows, css='left')}"
        )
    return "".join(parts)


def _linked(text: str) -> str:
    if text.startswith("https://"):
        return f"<a href='{escape(text)}'>{escape(text)}</a>"
    return escape(text)


def _next(found: Diagnosis) -> str:
    parts = []
    if found.command:
        parts.append(f"<h3>Command line now</h3><pre>{escape(broken(found.command, 110))}</pre>")
    if found.changed_command:
        heading = "Changed command line: all problems and warnings"
        parts.append(f"<h3>{heading}</h3><pre>{escape(broken(found.changed_command, 110))}</pre>")
    if found.prove_command:
        heading = "Measure it before you rely on it"
        parts.append(f"<h3>{heading}</h3><pre>{escape(broken(found.prove_command, 110))}</pre>")
    return f"<section><h2>What to do next</h2>{''.join(parts)}</section>" if parts else ""
