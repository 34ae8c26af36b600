"""`powerband rollout`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli.output import Json, emit, out, stderr


def rollout(
    new: Annotated[str, typer.Argument(metavar="RECIPE|DEPLOYMENT", help="What to serve from now on.")],
    *,
    fleet: Annotated[str, typer.Option(help="The folder of a running fleet: 'powerband serve' names it.")],
    model: Annotated[str | None, typer.Option(help="Whose place it takes, where the fleet serves several.")] = None,
    share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Of the requests that it gets on trial.")] = 0.1,
    requests: Annotated[int, typer.Option(min=1, help="How many it must answer no worse than the old one.")] = 100,
    patience: Annotated[str, typer.Option(help="How long the trial may take.")] = "10min",
    json: Json = False,
) -> None:
    """Try another recipe beside the one that is served, and promote it or roll it back. Exit code 4: rolled back."""
    import asyncio
    from pathlib import Path

    from powerband import rollout as stage
    from powerband.cli import inputs
    from powerband.errors import PromiseBroken

    console = stderr()
    verdict = asyncio.run(
        stage.rollout(
            Path(fleet),
            Path(new),
            model=model,
            share=share,
            requests=requests,
            timeout_s=inputs.seconds(patience),
            say=lambda said: None if json else console.print(said),
        )
    )
    if json:
        emit({"promoted": verdict.promoted, "reason": verdict.reason, "answered": verdict.answered})
        raise typer.Exit(0 if verdict.promoted else PromiseBroken.exit_code)
    if not verdict.promoted:
        raise PromiseBroken(f"rolled back: {verdict.reason}", hint="the old recipe serves as before")
    out().print(f"[bold green]promoted[/]  {verdict.reason}")
