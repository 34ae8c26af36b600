"""Where a picker of its own learns of endpoints: Kubernetes, DNS or a file; and what their model servers report.

Each source has `watch`, which calls `on_change` with all endpoints whenever one of them changes, and does not end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Discovered:
    """An endpoint as its source knows it."""

    name: str
    address: str  # IP:PORT
    ready: bool | None = None  # None: the source does not know; probes tell
    recipe: str = ""  # name of its recipe; empty: the first one
    start_s: float | None = None  # measured duration of its start


OnChange = Callable[[Sequence[Discovered]], None]


class Source(Protocol):
    """A source of endpoints."""

    async def watch(self, on_change: OnChange) -> None:
        """Call `on_change` with all endpoints, at first and after each change."""
