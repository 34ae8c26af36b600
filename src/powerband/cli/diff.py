"""`powerband diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli.output import Json, emit, out

if TYPE_CHECKING:
    from powerband.core.measurement import Measurement
    from powerband.core.recipe import Recipe


def diff(
    first: Annotated[str, typer.Argument(help="A measurement.json, a folder that holds one, or a recipe.yaml.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Compare although they may not be compared.")] = False,
    json: Json = False,
) -> None:
    """Say whether two measurements differ, and whether they may be compared; or what two recipes differ in."""
    from pathlib import Path

    from powerband.core.measurement import Measurement
    from powerband.core.recipe import Recipe
    from powerband.errors import InputError
    from powerband.store import documents

    paths = [Path(given) / "measurement.json" if Path(given).is_dir() else Path(given) for given in (first, second)]
    one, other = (documents.read(path) for path in paths)
    if isinstance(one, Recipe) and isinstance(other, Recipe):
        _recipes(one, other, json=json)
    elif isinstance(one, Measurement) and isinstance(other, Measurement):
        _measurements(one, other, force=force, json=json)
    else:
        raise InputError(
            f"a {one.kind} and a {other.kind} are not compared", hint="give two measurements of 'bench', or two recipes"
        )


def _measurements(one: Measurement, other: Measurement, *, force: bool, json: bool) -> None:
    from dataclasses import asdict

    from powerband.bench import compare
    from powerband.errors import InputError
    from powerband.reports import console

    found = compare.compare(one, other)
    if found.obstacles and not force:
        raise InputError("not comparable: " + "; ".join(found.obstacles), hint="--force compares nevertheless")
    if json:
        emit({"different": found.different, **asdict(found)})
        return
    for part in console.comparison(found):
        out().print(part)


def _recipes(one: Recipe, other: Recipe, *, json: bool) -> None:
    """What stands in one and not in the other, by its path."""
    from powerband.reports import study

    found = study.differences(one, other)
    if json:
        emit({"different": bool(found), "differences": {path: list(pair) for path, pair in found.items()}})
        return
    console = out()
    if not found:
        console.print("the same recipe")
    for path, (was, now) in found.items():
        console.print(f"{path}: {was} -> {now}", markup=False)
