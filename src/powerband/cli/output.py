"""How a command speaks: data to stdout, talk to stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of text for people.")]


def emit(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False, default=sorted), flush=True)


def out() -> Console:
    """Return the console for data."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def stderr() -> Console:
    """Return the console for talk."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def warning(sentence: str, hint: str) -> Text:
    """Return a warning with what to do about it; text of others is never read as markup."""
    from rich.text import Text

    return Text.assemble(("! ", "yellow"), sentence, (f"; {hint}" if hint else "", "dim"))
