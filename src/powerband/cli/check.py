"""`powerband check`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, warning


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A document: deployment, workload, SLO, ...")],
    *,
    here: Annotated[
        bool,
        typer.Option("--here", help="Also check a deployment against this machine: engine, model, memory."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Validate a document; with --here, whether it can start here.

    Nothing is started.
    """
    from powerband.core.deployment import Deployment
    from powerband.core.engine import Problem
    from powerband.errors import InputError
    from powerband.store import documents

    document = documents.read(file)
    warnings: list[Problem] = []
    if here:
        if not isinstance(document, Deployment):
            raise InputError(f"{file} is a {document.kind}; --here is for deployments", hint="omit --here")
        from powerband.launchers import local

        warnings = local.prepare(document, download=False).problems
    if json:
        found = [problem.model_dump() for problem in warnings]
        emit({"file": file, "kind": document.kind, "digest": document.digest(), "warnings": found})
        return
    out().print(f"[green]ok[/] {file}: {document.header()} {document.digest()[:19]}")
    for problem in warnings:
        out().print(warning(problem.sentence, problem.hint))
