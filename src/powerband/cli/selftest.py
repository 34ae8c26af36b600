"""`powerband selftest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr

if TYPE_CHECKING:
    from powerband.core.selftest import CheckResult


def selftest(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Model directory or GGUF file; one of each is possible.",
            show_default="the smallest ones in the caches",
        ),
    ] = None,
    *,
    engine: options.OnlyEngine = None,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="Time limit; what no longer fits is left out.")] = (
        "45min"
    ),
    output: Annotated[str, typer.Option(metavar="FILE", help="Write the bundle there.")] = "selftest.json",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check this machine and its engines; write a bundle to send.

    The bundle has no host names, paths, prompts or keys.
    Exit code 4: a check failed.
    """
    import asyncio
    from pathlib import Path

    from rich.text import Text

    from powerband import inputs
    from powerband import selftest as stage
    from powerband.errors import RequirementNotMet
    from powerband.reports import selftest as report
    from powerband.selftest import bundle

    console = stderr(json=json)

    def on_result(result: CheckResult, detail: str) -> None:
        console.print(Text(f"{result.state:>12}  {result.engine or 'machine'}: {result.check}"))
        if detail:
            console.print(Text(f"              {detail}", "dim"))

    spec = stage.SelftestSpec(models=tuple(model or ()), engine=engine, budget_s=inputs.seconds(budget))
    progress = stage.Progress(report=lambda text: console.print(Text(text, "dim")), on_result=on_result)
    found = asyncio.run(stage.run(spec, progress)).found
    if not json:
        out().print(report.table(found))  # first: the bundle may be refused
    bundle.write(found, Path(output))
    if json:
        emit(found.to_data())
    console.print(f"bundle: {output}", markup=False)
    if failed := found.count("failed"):
        raise RequirementNotMet(
            f"{failed} of {len(found.checks)} checks failed",
            hint=f"read {output}, then send it with an issue; 'powerband show {output}' prints it",
        )
