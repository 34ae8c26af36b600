"""`powerband adopt`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr


def adopt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The selftest.json of any machine.")],
    *,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write the files there.", show_default="where 'plan' reads calibrations"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Use a self-test's bundle: for plans, the support table and tests."""
    from rich.text import Text

    from powerband import inputs
    from powerband.core.selftest import Selftest
    from powerband.errors import DocumentError
    from powerband.selftest import adopt as stage
    from powerband.store import documents

    try:
        bundle = documents.read_as(Selftest, file)
    except DocumentError as error:
        hint = f"give the file of 'powerband selftest'; for results of other tools: 'powerband import {file}'"
        raise DocumentError(error.message, hint=hint) from None
    found = stage.adopt(bundle, inputs.folder(output) if output else None)
    written = {"calibrations": found.calibrations, "support": found.support, "fixtures": found.fixtures}
    if json:
        emit({kind: [str(path) for path in paths] for kind, paths in written.items()} | {"notes": list(found.notes)})
        return
    for note in found.notes:
        stderr().print(Text(f"note: {note}"))
    for kind, paths in written.items():
        for path in paths:
            out().print(Text(f"{kind:>12}  {path}"), soft_wrap=True)
