"""Draw a workload in a terminal: lengths, arrivals, what is shared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from powerband.core import statistics
from powerband.core.workload import Workload

_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 48


def workload(
    given: Workload, due_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], known: float
) -> Iterator[RenderableType]:
    """Return the pictures of a sample of the traffic."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", "", f"[dim]of {len(prompts):,} requests[/]")
    table.add_row("[bold]prompt[/]", _bars(_spread(prompts)), _figures(prompts))
    table.add_row("[bold]output[/]", _bars(_spread(outputs)), _figures(outputs))
    users = getattr(given.arrivals, "users", None)
    if users:
        table.add_row("[bold]arrivals[/]", "", f"a closed loop of {users} users")
    else:
        span = max(due_s[-1], 1e-9)
        counts = [0] * _COLUMNS
        for moment in due_s:
            counts[min(_COLUMNS - 1, int(moment / span * _COLUMNS))] += 1
        gaps = [later - earlier for earlier, later in pairwise(due_s)]
        mean = sum(gaps) / max(1, len(gaps))
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1)) if gaps else 0.0
        rate = f"{(len(due_s) - 1) / span:.3g}/s over {span:.0f} s, gaps vary by {spread / mean if mean else 0:.2f}"
        table.add_row("[bold]arrivals[/]", _bars(counts), rate)
    filled = round(known * _COLUMNS)
    table.add_row(
        "[bold]shared[/]", "█" * filled + "░" * (_COLUMNS - filled), f"{known:.0%} of prompt tokens came before"
    )
    if given.adapters:
        table.add_row("[bold]adapters[/]", ", ".join(f"{one.name} {one.share:.0%}" for one in given.adapters), "")
    if given.turns:
        table.add_row("[bold]turns[/]", f"{given.turns.count}, {given.turns.think_s:g} s apart", "")
    yield Text()
    yield table


def _figures(values: Sequence[int]) -> str:
    ordered = sorted(values)
    p50, p95 = (statistics.quantile(ordered, p) for p in (0.5, 0.95))
    return f"{ordered[0]:,} to {ordered[-1]:,} tokens, median {p50:,.0f}, p95 {p95:,.0f}"


def _spread(values: Sequence[int]) -> list[int]:
    """Count the values in bins from the least to the largest."""
    low, high = min(values), max(values)
    counts = [0] * _COLUMNS
    for value in values:
        counts[min(_COLUMNS - 1, int((value - low) / max(1, high - low) * _COLUMNS))] += 1
    return counts


def _bars(counts: Sequence[int]) -> str:
    top = max(max(counts), 1)
    return "".join(_BARS[math.ceil(count / top * (len(_BARS) - 1))] for count in counts)
