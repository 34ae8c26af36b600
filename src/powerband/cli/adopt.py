"""`powerband adopt`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out, stderr


def adopt(
    file: Annotated[str, typer.Argument(help="A result of vllm bench, guidellm or aiperf, with every request.")],
    *,
    output: Annotated[str, typer.Option(help="Where the measurement goes.")] = "measurement.json",
    json: Json = False,
) -> None:
    """Read another tool's result as a measurement: the same percentiles and intervals, ready for 'diff'."""
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
