"""`powerband top`, and the table that `serve` shows too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli.output import Json, emit, talk

if TYPE_CHECKING:
    from rich.table import Table


def top(
    fleet: Annotated[str, typer.Argument(help="The folder of a running fleet: 'powerband serve' names it.")],
    *,
    json: Json = False,
) -> None:
    """Watch a fleet: replicas, queue, KV cache, prefix hits, memory, first tokens, cost. Ctrl-C leaves it alone."""
    import json as text
    import time
    from pathlib import Path

    from powerband.errors import InputError

    path = Path(fleet) / "status.json"

    def status() -> dict[str, Any]:
        try:
            found: dict[str, Any] = text.loads(path.read_text())
        except (OSError, ValueError):
            raise InputError(f"no fleet runs in {fleet}", hint="give the folder that 'powerband serve' named") from None
        return found

    if json:
        emit(status())
        return
    console = talk()
    if not console.is_terminal:
        console.print(table(status()))
        return
    from rich.live import Live

    try:
        with Live(table(status()), console=console, refresh_per_second=2, screen=True) as live:
            while True:
                time.sleep(0.5)
                live.update(table(status()))
    except KeyboardInterrupt:
        pass


def table(status: dict[str, Any]) -> Table:
    """Return the fleet as it is, a row for each replica."""
    from rich.table import Table

    pools = status.get("pools", {})
    waiting = sum(pool["depth"] for pool in pools.values())
    refused, firsts = sum(status.get("refused", {}).values()), _first_tokens(status)
    said = [f"{status.get('done', 0)} answered", f"{waiting} waiting", f"{refused} refused"]
    said += [f"{status.get('overflows', 0)} overflowed", *([f"first token p50 {firsts}"] if firsts else [])]
    said += [f"${sum(one['usd'] for one in status.get('tenants', {}).values()):.4f} of tokens"]
    found = Table(title=", ".join(said), title_justify="left", box=None, padding=(0, 2))
    for name in ("replica", "state", "answering", "KV", "prefix hits", "accepted", "memory", "starts", "start-up"):
        found.add_column(name)
    for one in status.get("replicas", []):
        gauges = one["gauges"]
        found.add_row(
            one["name"],
            one["problem"] or one["state"],
            str(pools.get(one["model"], {}).get("running", {}).get(one["name"], 0)),
            _share(gauges.get("kv_use"), 1.0),
            _share(gauges.get("prefix_hits_tokens"), gauges.get("prefix_queries_tokens")),
            _share(gauges.get("spec_accepted_tokens"), gauges.get("spec_drafted_tokens")),
            _memory(one["pid"]),
            str(one["starts"]),
            f"{one['start_s']:.1f} s" if one["start_s"] else "",
        )
    return found


def _first_tokens(status: dict[str, Any]) -> str:
    import statistics

    seen = [ttft for held in status.get("recipes", {}).values() for ttft in held["ttft_s"]]
    return f"{statistics.median(seen) * 1e3:.0f} ms" if seen else ""


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else ""


def _memory(pid: int | None) -> str:
    import psutil

    from powerband.core.units import about_bytes

    try:
        root = psutil.Process(pid)
        return about_bytes(sum(one.memory_info().rss for one in (root, *root.children(recursive=True))))
    except psutil.Error:
        return ""
