"""`powerband diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out

if TYPE_CHECKING:
    from powerband.core.measurement import Measurement
    from powerband.core.recipe import Recipe


def diff(
    first: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A measurement.json, a directory with one, or a recipe.yaml.")
    ],
    second: Annotated[str, typer.Argument(metavar="AFTER", help="A document of the same kind.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Compare measurements of different conditions.")] = False,
    json: options.Json = False,
) -> None:
    """Compare two measurements with intervals, or two recipes.

    Measurements of different workloads are compared only with --force; other differences are listed.
    """
    from pathlib import Path

    from powerband.core.measurement import Measurement
    from powerband.core.recipe import Recipe
    from powerband.errors import InputError
    from powerband.store import documents

    paths = [Path(path) / "measurement.json" if Path(path).is_dir() else Path(path) for path in (first, second)]
    one, other = (documents.read(path) for path in paths)
    if isinstance(one, Recipe) and isinstance(other, Recipe):
        _recipes(one, other, json=json)
    elif isinstance(one, Measurement) and isinstance(other, Measurement):
        _measurements(one, other, force=force, json=json)
    else:
        raise InputError(
            f"cannot compare a {one.kind} with a {other.kind}", hint="give two measurements or two recipes"
        )


def _measurements(one: Measurement, other: Measurement, *, force: bool, json: bool) -> None:
    from dataclasses import asdict

    from powerband.bench import compare
    from powerband.errors import InputError
    from powerband.reports import console

    found = compare.compare(one, other)
    if found.obstacles and not force:
        raise InputError("not comparable: " + "; ".join(found.obstacles), hint="compare anyway with --force")
    if json:
        emit({"different": found.different, **asdict(found)})
        return
    for part in console.comparison(found):
        out().print(part)


def _recipes(one: Recipe, other: Recipe, *, json: bool) -> None:
    """Print the fields that differ, by their path."""
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
