"""`powerband show`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out


def show(
    file: Annotated[str, typer.Argument(help="A document: a deployment, a workload, an SLO.")],
    *,
    json: Json = False,
) -> None:
    """Print a document in its canonical form. --json has base units: seconds, bytes."""
    from powerband.store import documents

    document = documents.read(file)
    if json:
        emit({"digest": document.digest(), **document.to_data()})
        return
    from rich.syntax import Syntax

    console = out()
    console.print(f"# {document.digest()}", style="dim")
    if console.is_terminal:
        console.print(Syntax(document.to_text(), "yaml", background_color="default"))
    else:
        print(document.to_text(), end="")
