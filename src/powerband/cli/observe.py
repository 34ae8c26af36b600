"""`powerband observe` and `powerband capture`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out


def observe(
    fleet: Annotated[str, typer.Argument(help="The folder of a fleet that runs with --capture.")],
    *,
    model: Annotated[str | None, typer.Option(help="Which one, where the fleet serves several.")] = None,
    json: Json = False,
) -> None:
    """Is the traffic still what the recipe was proven with? Exit code 4: it drifted, or the promise is broken."""
    from pathlib import Path

    from powerband import observe as stage
    from powerband.core.recipe import Recipe
    from powerband.errors import PromiseBroken
    from powerband.serve.order import Order
    from powerband.store import documents

    part = Order.read(Path(fleet)).part(model)
    recipe = documents.of(Recipe, Path(part.path))
    notes = stage.notes(Path(fleet), part.name)
    found = stage.observe(recipe, stage.rows(notes), stage.first_tokens(notes))
    if json:
        axes = [{"axis": one.axis, "side": one.side, "request": one.request} for one in found.drifted]
        emit({"found": found.found, "requests": found.requests, "drifted": axes, "late": found.late})
        raise typer.Exit(0 if found.found == "in region" else PromiseBroken.exit_code)
    if found.found == "in region":
        out().print(
            f"[bold green]in region[/]  {found.requests} requests are like those that the recipe was proven with"
        )
        return
    said = [f"{one.axis.replace('_', ' ')} is {one.side} (request {one.request})" for one in found.drifted]
    raise PromiseBroken(
        f"{found.found}: {'; '.join(filter(None, (found.late, *said)))}",
        hint=f"'powerband capture {fleet}', then 'powerband tune {recipe.model} --workload captured.yaml'",
    )


def capture(
    fleet: Annotated[str, typer.Argument(help="The folder of a fleet that runs with --capture.")],
    *,
    model: Annotated[str | None, typer.Option(help="Which one, where the fleet serves several.")] = None,
    output: Annotated[str, typer.Option(help="The folder for the workload and its trace.")] = ".",
    name: Annotated[str, typer.Option(help="The workload's name.")] = "captured",
    json: Json = False,
) -> None:
    """Write a fleet's traffic as a workload: lengths, times and shared beginnings. Nobody's words are in it."""
    from pathlib import Path

    from powerband import observe as stage
    from powerband.cli import given
    from powerband.serve.order import Order

    part = Order.read(Path(fleet)).part(model)
    path = stage.captured(stage.notes(Path(fleet), part.name), given.folder(output), name=name)
    if json:
        emit({"workload": str(path)})
    else:
        print(path)
