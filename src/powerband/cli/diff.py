"""`powerband diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out


def diff(
    first: Annotated[str, typer.Argument(help="A measurement.json, or a folder that holds one.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Compare although they may not be compared.")] = False,
    json: Json = False,
) -> None:
    """Say whether two measurements differ, by how much, and whether they may be compared at all."""
    from dataclasses import asdict
    from pathlib import Path

    from powerband.bench import compare
    from powerband.core.measurement import Measurement
    from powerband.errors import InputError
    from powerband.store import documents

    sides = []
    for given in (first, second):
        path = Path(given) / "measurement.json" if Path(given).is_dir() else Path(given)
        document = documents.read(path)
        if not isinstance(document, Measurement):
            raise InputError(f"{given} is a {document.kind}, not a measurement", hint="give what 'bench' wrote")
        sides.append(document)
    found = compare.compare(*sides)
    if found.obstacles and not force:
        raise InputError("not comparable: " + "; ".join(found.obstacles), hint="--force compares nevertheless")
    if json:
        emit({"different": found.different, **asdict(found)})
        return
    from powerband.reports import console

    for part in console.comparison(found):
        out().print(part)
