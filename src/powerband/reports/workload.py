"""Draw a workload in a terminal: lengths, arrivals, shared prefixes."""

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
    spec: Workload, due_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int], prefix_share: float
) -> Iterator[RenderableType]:
    """Yield histograms of a sample of the traffic."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", "", f"[dim]sample of {len(prompts):,} requests[/]")
    table.add_row("[bold]prompt[/]", _bars(_histogram(prompts)), _figures(prompts))
    table.add_row("[bold]output[/]", _bars(_histogram(outputs)), _figures(outputs))
    users = getattr(spec.arrivals, "users", None)
    if users:
        table.add_row("[bold]arrivals[/]", "", f"closed loop, {users} users")
    else:
        span = max(due_s[-1], 1e-9)
        counts = [0] * _COLUMNS
        for at_s in due_s:
            counts[min(_COLUMNS - 1, int(at_s / span * _COLUMNS))] += 1
        gaps = [later - earlier for earlier, later in pairwise(due_s)]
        mean = sum(gaps) / max(1, len(gaps))
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1)) if gaps else 0.0
        variation = spread / mean if mean else 0.0
        rate = f"{(len(due_s) - 1) / span:.3g}/s over {span:.0f} s, coefficient of variation {variation:.2f}"
        table.add_row("[bold]arrivals[/]", _bars(counts), rate)
    filled = round(prefix_share * _COLUMNS)
    table.add_row(
        "[bold]shared[/]",
        "█" * filled + "░" * (_COLUMNS - filled),
        f"{prefix_share:.0%} of prompt tokens cacheable",
    )
    if spec.adapters:
        table.add_row("[bold]adapters[/]", ", ".join(f"{one.name} {one.share:.0%}" for one in spec.adapters), "")
    if spec.turns:
        table.add_row("[bold]turns[/]", f"{spec.turns.count}, pause {spec.turns.think_s:g} s", "")
    yield Text()
    yield table


def _figures(values: Sequence[int]) -> str:
    ordered = sorted(values)
    p50, p95 = (statistics.quantile(ordered, p) for p in (0.5, 0.95))
    return f"{ordered[0]:,} to {ordered[-1]:,} tokens, median {p50:,.0f}, p95 {p95:,.0f}"


def _histogram(values: Sequence[int]) -> list[int]:
    """Return a histogram from the minimum to the maximum."""
    low, high = min(values), max(values)
    counts = [0] * _COLUMNS
    for value in values:
        counts[min(_COLUMNS - 1, int((value - low) / max(1, high - low) * _COLUMNS))] += 1
    return counts


def _bars(counts: Sequence[int]) -> str:
    top = max(max(counts), 1)
    return "".join(_BARS[math.ceil(count / top * (len(_BARS) - 1))] for count in counts)
