"""`powerband verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr


def verify(
    file: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe.yaml.")],
    *,
    slo: Annotated[str | None, typer.Option(help="Another SLO than the recipe's.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="A knob that is to change; may stand again.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Other weights than the recipe's.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="The data of a task that the floor asks for.")
    ] = None,
    engine_path: Annotated[str | None, typer.Option(help="Another binary or interpreter of the engine.")] = None,
    seed: Annotated[int, typer.Option(help="Other requests of the same kind.")] = 0,
    output: Annotated[str | None, typer.Option(help="Where the measurement goes.")] = None,
    json: Json = False,
) -> None:
    """Prove a recipe again on this machine, as it is or with something changed.

    Exit code 4: a promise is broken. 3: it cannot be said.
    """
    import asyncio
    from dataclasses import asdict

    from rich.text import Text

    from powerband import verify as stage
    from powerband.core.recipe import Recipe
    from powerband.errors import InvalidMeasurement, PromiseBroken
    from powerband.store import documents, runs

    recipe = documents.of(Recipe, file)
    if slo:
        promise = recipe.promise.model_copy(update={"slo": inputs.promise(slo)})
        recipe = recipe.model_copy(update={"promise": promise})
    data = dict(recipe.deployment)
    data["config"] = dict(data.get("config") or {})
    for setting in set_ or []:
        inputs.set_knob(data["config"], setting)
    if source:
        data["variant"] = {**data["variant"], "source": source}
    recipe = recipe.model_copy(update={"deployment": data})
    tasks = inputs.exams(task or [], recipe.promise.quality, source=recipe.model, most=200)
    folder = inputs.folder(output) if output else runs.new_run(f"verify-{recipe.name or 'recipe'}")
    console = stderr()
    order = stage.VerifySpec(recipe, tasks=tasks, engine_path=engine_path, seed=seed)
    say = (lambda _: None) if json else lambda said: console.print(f"[dim]{said}[/]")
    found = asyncio.run(stage.verify(order, folder=folder, say=say))
    styles = {"holds": "green", "broken": "bold red", "cannot say": "yellow"}
    if json:
        emit({"found": found.found, **asdict(found)})
    else:
        for note in found.notes:
            out().print(Text(f"then and now: {note}", "dim"))
        for one in found.checks:
            out().print(Text.assemble((f"{one.found:>10}", styles[one.found]), f"  {one.promise}: {one.said}"))
    said = "; ".join(f"{one.promise}: {one.said}" for one in found.checks if one.found == found.found)
    if found.found == "broken":
        raise PromiseBroken(f"the recipe is broken: {said}", hint="run 'powerband tune' again")
    if found.found == "cannot say":
        raise InvalidMeasurement(f"it cannot be said whether the recipe holds: {said}", hint="is the machine quiet?")
