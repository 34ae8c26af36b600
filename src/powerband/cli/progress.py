"""Progress on stderr: the phases of an engine start, and a bar while a level runs."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from powerband.cli.output import duration, live, stderr

if TYPE_CHECKING:
    from rich.text import Text

    from powerband.bench.level_controller import LevelStatus
    from powerband.runtime.replica import Replica

_WIDTH = 20


def status_line(status: LevelStatus) -> Text:
    """Return the state of a level: load, phase, a bar with answers done of needed, and the time left."""
    from rich.text import Text

    line = Text.assemble((f"{status.load:>10}", "bold"), f"  {status.phase:<10}  ")
    if status.phase == "measuring":
        filled = round(_WIDTH * status.done / max(1, status.needed))
        line.append("━" * filled, "green")
        line.append("━" * (_WIDTH - filled), "dim")
        line.append(f"  {status.done}/{status.needed} requests")
        if status.remaining_s is not None:
            line.append(f"  {duration(status.remaining_s)} left")
    else:
        line.append(f"{status.in_flight} requests in flight")
    return line


@contextlib.contextmanager
def start_progress(json: bool) -> Any:
    """Show the phases of an engine start: in place on a terminal, otherwise a line each."""
    console, began = stderr(json=json), time.monotonic()

    def on_change(replica: Replica, event: str) -> None:
        if event in ("ready", "stopping", "stopped", "failed"):
            if status:
                status.stop()
        elif status:
            status.update(f"{replica.engine.name}: {event} ({time.monotonic() - began:.1f} s)")
        else:
            console.print(f"{time.monotonic() - began:7.2f} s  {event}")

    status = console.status("starting") if live() and not json else None
    if status:
        status.start()
    try:
        yield on_change
    finally:
        if status:
            status.stop()
