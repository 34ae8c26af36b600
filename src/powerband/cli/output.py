"""Where a command writes: data to stdout, progress and messages to stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_verbosity = 0


def set_verbosity(level: int) -> None:
    """Set how much goes to stderr: -1 errors only, 0 progress, 1 every step on its own line."""
    global _verbosity
    _verbosity = level


def verbosity() -> int:
    """Return the level that -q or -v set."""
    return _verbosity


def emit(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, default=sorted), flush=True)


def out() -> Console:
    """Return the console for data: stdout."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def stderr(*, json: bool = False) -> Console:
    """Return the console for progress and messages; -q and JSON output silence it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=json or _verbosity < 0)


def live() -> bool:
    """Return whether progress is drawn in place: on a terminal, unless -q or -v was given."""
    return sys.stderr.isatty() and _verbosity == 0


def duration(seconds: float) -> str:
    """Format a duration for a progress line: '8 s', '2 min 05 s', '1 h 20 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def warning(sentence: str, hint: str) -> Text:
    """Return a warning with its hint; the text is not parsed as markup."""
    from rich.text import Text

    return Text.assemble(("warning: ", "yellow"), sentence, (f"; {hint}" if hint else "", "dim"))
