"""`powerband schema`."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from powerband.cli.output import Json


def schema(
    kind: Annotated[str, typer.Argument(help="deployment, workload or slo")],
    *,
    json: Json = False,
) -> None:
    """Print the JSON Schema of a kind, for your editor."""
    from powerband.store import documents

    print(jsonlib.dumps(documents.json_schema(kind), indent=2))
