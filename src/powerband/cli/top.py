"""`powerband top`, and the table that `serve` shows too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli.output import Json, emit, stderr

if TYPE_CHECKING:
    from rich.table import Table


def top(
    fleet: Annotated[str, typer.Argument(help="The folder of a running fleet: 'powerband serve' names it.")],
    *,
    json: Json = False,
) -> None:
    """Watch a fleet: replicas, queue, SLO, cost, KV cache, prefix hits, drafts, memory. Ctrl-C leaves it alone."""
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
    console = stderr()
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

    pools, replicas = status.get("pools", {}), status.get("replicas", [])
    found = Table(title=_title(status), title_justify="left", box=None, padding=(0, 2, 0, 0))
    found.add_column("replica", overflow="fold")
    for name in ("state", "busy", "KV\nused", "prefix\nhits", "drafts\ntaken", "memory", "weights\n+ KV", "starts"):
        found.add_column(name)
    for one in replicas:
        gauges, about = one["gauges"], one["about"]
        found.add_row(
            one["name"],
            one["problem"] or one["state"],
            str(pools.get(one["model"], {}).get("running", {}).get(one["name"], 0)),
            _share(gauges.get("kv_use"), 1.0),
            _share(gauges.get("prefix_hits_tokens"), gauges.get("prefix_queries_tokens")),
            _share(gauges.get("spec_accepted_tokens"), gauges.get("spec_drafted_tokens")),
            _memory(one["pid"]),
            f"{_size(about['weights_bytes'])}\n+ {_size(about['kv_bytes'])}",
            f"{one['starts']}\n{one['start_s']:.1f} s" if one["start_s"] else str(one["starts"]),
        )
    return found


def _title(status: dict[str, Any]) -> str:
    """Return what is true of the fleet as a whole."""
    import statistics

    import psutil

    waiting = sum(pool["depth"] for pool in status.get("pools", {}).values())
    counts = [f"{status.get('done', 0)} answered", f"{waiting} waiting"]
    counts += [f"{sum(status.get('refused', {}).values())} refused", f"{status.get('overflows', 0)} overflowed"]
    replicas, recipes = status.get("replicas", []), status.get("recipes", {})
    limits = {one["recipe"]: one["about"]["ttft_s"] for one in replicas}
    firsts = [(first, limits.get(name)) for name, held in recipes.items() for first in held["ttft_s"]]
    costs = []
    if firsts:
        costs.append(f"first token p50 {statistics.median(first for first, _ in firsts) * 1e3:.0f} ms")
    if promised := [first <= limit for first, limit in firsts if limit is not None]:
        costs.append(f"{statistics.fmean(promised):.1%} within the SLO")
    if usd_per_h := sum(one["about"]["usd_per_h"] for one in replicas):  # which a recipe tells, and nothing else
        costs.append(f"${usd_per_h:.2f} an hour")
    costs.append(f"${sum(one['usd'] for one in status.get('tenants', {}).values()):.4f} of tokens")
    counts.append(f"{_size(psutil.virtual_memory().available)} of memory free")
    return ", ".join(counts) + "\n" + ", ".join(costs)


def _size(count: int | None) -> str:
    from powerband.core.units import about_bytes

    return about_bytes(count) if count else "?"


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else ""


def _memory(pid: int | None) -> str:
    import psutil

    if pid is None:
        return ""
    try:
        root = psutil.Process(pid)
        return _size(sum(one.memory_info().rss for one in (root, *root.children(recursive=True))))
    except psutil.Error:
        return ""
