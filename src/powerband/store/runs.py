"""The run directory: one folder for everything that a run leaves."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path


def state_root() -> Path:
    """Return where runs are kept: $POWERBAND_STATE, or powerband under the user's state folder."""
    if given := os.environ.get("POWERBAND_STATE"):
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "powerband"


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is read again later; a half-written one never stands there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def new_run(label: str, *, root: Path | None = None) -> Path:
    """Make a new, empty directory named for the time and the label; never one that exists."""
    root = root or state_root() / "runs"
    name = time.strftime("%Y%m%d-%H%M%S-") + re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:60]
    for number in itertools.count():
        path = root / (f"{name}-{number}" if number else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
