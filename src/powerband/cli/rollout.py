"""`powerband rollout`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr


def rollout(
    new: Annotated[
        str, typer.Argument(metavar="RECIPE|DEPLOYMENT", help="New recipe.yaml or deployment.yaml to serve.")
    ],
    *,
    fleet: Annotated[
        str, typer.Option(metavar="FLEET_DIR", help="Directory of the running fleet; 'powerband serve' prints it.")
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to replace; required if the fleet serves several.")
    ] = None,
    canary_weight: Annotated[
        float, typer.Option(min=0.01, max=0.9, metavar="SHARE", help="Share of the requests that the canary gets.")
    ] = 0.1,
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that the canary must serve no worse than the old recipe.")
    ] = 100,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Maximum duration of the canary phase.")] = "10min",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Canary a new recipe in a running fleet; promote or roll back.

    Exit code 4: rolled back.
    """
    import asyncio
    from pathlib import Path

    from powerband import inputs
    from powerband import rollout as stage
    from powerband.errors import RequirementNotMet

    console = stderr(json=json)
    result = asyncio.run(
        stage.rollout(
            Path(fleet),
            Path(new),
            model=model,
            canary_weight=canary_weight,
            requests=requests,
            timeout_s=inputs.seconds(timeout),
            report=console.print,
        )
    )
    if json:
        emit({"promoted": result.promoted, "reason": result.reason, "answered": result.answered})
        raise typer.Exit(0 if result.promoted else RequirementNotMet.exit_code)
    if not result.promoted:
        raise RequirementNotMet(f"rolled back: {result.reason}", hint="the old recipe serves as before")
    out().print(f"[bold green]promoted[/]  {result.reason}")
