"""`powerband verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr


def verify(
    file: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe.yaml.")],
    *,
    slo: Annotated[
        str | None,
        typer.Option(**options.catalogue("slo", "NAME|FILE"), help="Verify against this SLO instead of the recipe's."),
    ] = None,
    set_: options.Set = None,
    source: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Verify with these weights instead of the recipe's.")
    ] = None,
    task: options.Tasks = None,
    engine_path: options.EnginePath = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Workload seed; the same seed gives the same requests.")] = 0,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for results.", show_default="a new run directory")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Check that a recipe still holds on this machine.

    Run it after any upgrade, or with --set, --slo or --source to check a change.
    Exit codes: 4 a promise is broken, 6 undecided.
    """
    from dataclasses import asdict

    from rich.text import Text

    from powerband import api
    from powerband.cli.engine import step_printer
    from powerband.errors import RequirementNotMet, Undecided

    console = stderr(json=json)
    found = api.verify(
        file,
        slo=slo,
        set=set_ or (),
        source=source,
        task=task or (),
        engine_path=engine_path,
        seed=seed,
        output=output,
        report=lambda message: console.print(f"[dim]{message}[/]"),
        on_step=step_printer("lm-eval: ", json=json),
    )
    styles = {"holds": "green", "broken": "bold red", "undecided": "yellow"}
    if json:
        emit({"found": found.found, **asdict(found)})
    else:
        for note in found.notes:
            out().print(Text(f"changed since validation: {note}", "dim"))
        for one in found.checks:
            out().print(Text.assemble((f"{one.found:>9}", styles[one.found]), f"  {one.promise}: {one.said}"))
    reasons = "; ".join(f"{one.promise}: {one.said}" for one in found.checks if one.found == found.found)
    if found.found == "broken":
        raise RequirementNotMet(f"the recipe no longer holds: {reasons}", hint="find a new one with 'powerband tune'")
    if found.found == "undecided":
        raise Undecided(f"undecided: {reasons}", hint="repeat it on an idle machine")
