"""`powerband export`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, stderr


def export(
    recipe: Annotated[str, typer.Argument(help="A recipe.yaml.")],
    *,
    to: Annotated[
        str,
        typer.Option(help="command, compose, kubernetes, ray-serve, systemd, grafana or alerts."),
    ] = "command",
    output: Annotated[
        str | None, typer.Option(help="The folder for the files.", show_default="one file goes to stdout")
    ] = None,
    json: Json = False,
) -> None:
    """Write a recipe in the words of another system: the very options that were proven, and its own figures."""
    from pathlib import Path

    from powerband import export as stage
    from powerband.core.recipe import Recipe
    from powerband.errors import InputError
    from powerband.store import documents

    files = stage.export(documents.of(Recipe, Path(recipe)), to)
    if json:
        emit({"to": to, "files": files})
        return
    if output is None:
        if len(files) > 1:
            raise InputError(f"{to} makes {', '.join(files)}", hint="give a folder with --output")
        print(next(iter(files.values())), end="")
        return
    folder = inputs.folder(output)
    for name, text in files.items():
        (folder / name).write_text(text)
        stderr().print(f"wrote {folder / name}")
