"""`powerband schema`."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from powerband.cli import options


def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Document kind: deployment, workload, slo, recipe, ...")],
    *,
    json: options.Json = False,
) -> None:
    """Print the JSON Schema of a document kind, for your editor."""
    from powerband.store import documents

    print(jsonlib.dumps(documents.json_schema(kind), indent=2))
