"""`powerband export`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, stderr

TARGETS = ("command", "compose", "kubernetes", "ray-serve", "systemd", "grafana", "alerts")
_WITH_IMAGE = ("compose", "kubernetes")


def export(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe.yaml.")],
    *,
    to: Annotated[str, typer.Option(**options.choice("target", TARGETS), help="Target system.")] = "command",
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for the files.", show_default="stdout, if one file")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Container image.", show_default="the published image of the engine's build"
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Export a recipe as Compose, Kubernetes, Ray Serve, systemd, ...

    The files hold the options and figures that were measured.
    """
    from pathlib import Path

    from powerband import export as stage
    from powerband import inputs
    from powerband.core.recipe import Recipe
    from powerband.errors import InputError
    from powerband.store import documents

    if image is not None and to not in _WITH_IMAGE:
        raise InputError("--image applies to compose and kubernetes", hint=f"omit --image with --to {to}")
    files = stage.export(documents.read_as(Recipe, Path(recipe)), to, image=image)
    if json:
        emit({"to": to, "files": files})
        return
    if output is None:
        if len(files) > 1:
            raise InputError(
                f"--to {to} writes {len(files)} files: {', '.join(files)}", hint="choose a directory with --output"
            )
        print(next(iter(files.values())), end="")
        return
    folder = inputs.folder(output)
    for name, text in files.items():
        (folder / name).write_text(text)
        stderr().print(f"wrote {folder / name}")
