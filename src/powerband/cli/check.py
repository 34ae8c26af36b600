"""`powerband check`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out, warning


def check(
    file: Annotated[str, typer.Argument(help="A document: a deployment, a workload, an SLO.")],
    *,
    here: Annotated[
        bool,
        typer.Option("--here", help="Check a deployment against this machine too: engine, model, memory."),
    ] = False,
    json: Json = False,
) -> None:
    """Check a document. With --here also whether it could start on this machine; nothing is started."""
    from powerband.core.deployment import Deployment
    from powerband.core.engine import Problem
    from powerband.errors import InputError
    from powerband.store import documents

    document = documents.read(file)
    warnings: list[Problem] = []
    if here:
        if not isinstance(document, Deployment):
            raise InputError(f"{file} is a {document.kind}; --here is for deployments", hint="leave --here away")
        from powerband.launchers import local

        warnings = local.prepare(document).problems
    if json:
        found = [problem.model_dump() for problem in warnings]
        emit({"file": file, "kind": document.kind, "digest": document.digest(), "warnings": found})
        return
    out().print(f"[green]ok[/] {file}: {document.header()} {document.digest()[:19]}")
    for problem in warnings:
        out().print(warning(problem.sentence, problem.hint))
