"""`powerband observe` and `powerband capture`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli.output import Json, emit, out

if TYPE_CHECKING:
    from pathlib import Path


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

    order = Order.read(Path(fleet) / "order.json")
    name = model or next(iter(order.parts))
    recipe = documents.of(Recipe, Path(order.parts[name].path))
    notes = _notes(Path(fleet))
    found = stage.observe(recipe, list(stage.read(notes)), stage.first_tokens(notes))
    axes = [{"axis": one.axis, "side": one.side, "request": one.request} for one in found.drifted]
    if json:
        emit({"found": found.found, "requests": found.requests, "drifted": axes, "late": found.late})
        raise typer.Exit(0 if found.found == "in region" else PromiseBroken.exit_code)
    if found.found == "in region":
        out().print(
            f"[bold green]in region[/]  {found.requests} requests are like those that the recipe was proven with"
        )
        return
    said = "; ".join(f"{one['axis'].replace('_', ' ')} is {one['side']}" for one in axes)  # type: ignore[attr-defined]
    raise PromiseBroken(
        f"{found.found}: {'; '.join(filter(None, (found.late, said)))}",
        hint=f"'powerband capture {fleet}', then 'powerband tune {recipe.model} --workload captured.yaml'",
    )


def capture(
    fleet: Annotated[str, typer.Argument(help="The folder of a fleet that runs with --capture.")],
    *,
    output: Annotated[str, typer.Option(help="The folder for the workload and its trace.")] = ".",
    name: Annotated[str, typer.Option(help="The workload's name.")] = "captured",
    json: Json = False,
) -> None:
    """Write a fleet's traffic as a workload: lengths, times and shared beginnings. Nobody's words are in it."""
    from pathlib import Path

    from powerband import observe as stage
    from powerband.cli import given

    path = stage.captured(_notes(Path(fleet)), given.folder(output), name=name)
    if json:
        emit({"workload": str(path)})
    else:
        print(path)


def _notes(folder: Path) -> Path:
    from powerband.errors import InputError

    path = folder / "traffic.jsonl"
    if not path.exists():
        raise InputError(f"{folder} holds no notes of its traffic", hint="serve with --capture")
    return path
