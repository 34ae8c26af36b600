"""`powerband top`, and the table that `powerband serve` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powerband.cli import options
from powerband.cli.output import emit, stderr

if TYPE_CHECKING:
    from rich.table import Table


def top(
    fleet: options.FleetDir,
    *,
    json: options.Json = False,
) -> None:
    """Show a fleet live: replicas, queue, SLO, cost, caches, memory.

    Ctrl-C closes the view; the fleet keeps running.
    """
    import json as text
    import time
    from pathlib import Path

    from powerband.errors import InputError

    path = Path(fleet) / "status.json"

    def status() -> dict[str, Any]:
        try:
            found: dict[str, Any] = text.loads(path.read_text())
        except (OSError, ValueError):
            raise InputError(
                f"no running fleet in {fleet}: status.json is missing",
                hint="give the directory that 'powerband serve' prints",
            ) from None
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
    """Return a table with a row for each replica."""
    from rich.table import Table

    pools, replicas = status.get("pools", {}), status.get("replicas", [])
    found = Table(title=_title(status), title_justify="left", box=None, padding=(0, 2, 0, 0))
    found.add_column("replica", overflow="fold")
    for name in ("state", "busy", "KV\nused", "prefix\nhits", "draft\naccept", "memory", "weights\n+ KV", "starts"):
        found.add_column(name)
    for one in replicas:
        gauges, about = one["gauges"], one["about"]
        found.add_row(
            _with_gpus(one["name"], one.get("gpus", ())),
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


def _with_gpus(name: str, gpus: Sequence[int]) -> str:
    """Return the name of a replica, and below it the GPUs that it holds."""
    return f"{name}\nGPU {','.join(map(str, gpus))}" if gpus else name


def _title(status: dict[str, Any]) -> str:
    """Return the figures of the whole fleet."""
    import statistics

    import psutil
    from rich.markup import escape

    waiting = sum(pool["depth"] for pool in status.get("pools", {}).values())
    counts = [f"{status.get('done', 0)} answered", f"{waiting} waiting"]
    counts += [f"{sum(status.get('refused', {}).values())} rejected", f"{status.get('overflows', 0)} sent to fallback"]
    replicas, recipes = status.get("replicas", []), status.get("recipes", {})
    limits = {one["recipe"]: one["about"]["ttft_s"] for one in replicas}
    firsts = [(first, limits.get(name)) for name, held in recipes.items() for first in held["ttft_s"]]
    costs = []
    if firsts:
        costs.append(f"TTFT p50 {statistics.median(first for first, _ in firsts) * 1e3:.0f} ms")
    if promised := [first <= limit for first, limit in firsts if limit is not None]:
        costs.append(f"{statistics.fmean(promised):.1%} within the SLO")
    if usd_per_h := sum(one["about"]["usd_per_h"] for one in replicas):  # only recipes have a price
        costs.append(f"${usd_per_h:.2f}/h")
    costs.append(f"${sum(one['usd'] for one in status.get('tenants', {}).values()):.4f} billed to tenants")
    counts.append(f"{_size(psutil.virtual_memory().available)} memory free")
    scaling = [f"{escape(name)} scales to {escape(one['reason'])}" for name, one in status.get("scaling", {}).items()]
    problems = [f"[bold red]problem:[/] {escape(one)}" for one in status.get("problems", ())]
    return "\n".join([", ".join(counts), ", ".join(costs), *scaling, *problems])


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
