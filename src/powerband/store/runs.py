"""Run directories: one for the files of each run."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path


def state_root() -> Path:
    """Return the state directory: $POWERBAND_STATE, or `powerband` in the user's state directory."""
    if path := os.environ.get("POWERBAND_STATE"):
        return Path(path)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "powerband"


def write_atomic(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # its mode would stay
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as stream:
        stream.write(text)
    partial.replace(path)


def new_run(label: str, *, root: Path | None = None) -> Path:
    """Create a new directory, named after the time and the label."""
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
