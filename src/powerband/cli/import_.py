"""`powerband import`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr


def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Result of vllm bench, guidellm or aiperf, with every request.")
    ],
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="Measurement to write.")] = "measurement.json",
    json: options.Json = False,
) -> None:
    """Import a result of vllm bench, guidellm or aiperf.

    It becomes a measurement with the same percentiles and intervals, ready for 'powerband diff'.
    """
    from pathlib import Path

    from powerband.bench import importers
    from powerband.reports import console

    found = importers.read(Path(file))
    Path(output).write_text(found.to_json())
    if json:
        emit({"measurement": output, "tool": found.provenance["tool"], "levels": len(found.levels)})
        return
    for part in console.measurement(found):
        out().print(part)
    stderr().print(f"wrote {output}")
