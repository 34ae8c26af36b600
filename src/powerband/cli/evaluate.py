"""`powerband evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr


def evaluate(
    candidate: Annotated[
        str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="Deployment or model to evaluate, as it will be served.")
    ],
    *,
    reference: Annotated[
        str, typer.Option(metavar="DEPLOYMENT|MODEL", help="Deployment or model whose answers are the reference.")
    ],
    quality: options.Floor = "balanced",
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Questions as JSONL, or data of gsm8k, mmlu, ifeval, humaneval or wikitext; repeatable.",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=20, metavar="N", help="Maximum number of questions of a task.")] = 200,
    full: Annotated[bool, typer.Option("--full", help="Run every probe, even after the verdict is clear.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ignore cached answers and verdicts.")] = False,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Allow humaneval to execute code that the model writes.")
    ] = False,
    workload: Annotated[
        str | None,
        typer.Option(**options.catalogue("workload", "NAME|FILE"), help="Also compare on requests of this workload."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=8, max=40, metavar="N", help="Texts of each class and chats of each kind.")
    ] = 24,
    reserve: Annotated[
        str, typer.Option(metavar="TIME", help="Engine time for further probes if the verdict is undecided; 0s: none.")
    ] = "15min",
    engine: options.Engine = None,
    set_: options.Set = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for results.", show_default="a new run directory")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Compare a deployment's answers with a reference: pass or fail.

    Exit codes: 4 below the quality floor, 6 undecided.
    """
    from powerband import api, inputs
    from powerband.cli.engine import step_printer
    from powerband.errors import RequirementNotMet, Undecided
    from powerband.reports import evaluation as report
    from powerband.store import runs

    console = stderr(json=json)
    found = api.evaluate(
        candidate,
        reference=reference,
        quality=quality,
        task=task or (),
        questions=questions,
        full=full,
        refresh=refresh,
        run_code=run_code,
        workload=workload,
        samples=samples,
        reserve=reserve,
        engine=engine,
        set=set_ or (),
        report=lambda message: console.print(f"[dim]{message}[/]"),
        on_step=step_printer("lm-eval: ", json=json),
    )
    folder = inputs.folder(output) if output else runs.new_run("evaluate")
    page, data = folder / "evaluation.html", folder / "evaluation.json"
    data.write_text(found.to_json())
    page.write_text(report.page(found))
    if json:
        emit(found.to_data())
    else:
        for part in report.tables(found):
            out().print(part)
        console.print(f"report: {page}\n  data: {data}")
    if found.verdict == "fail":
        raise RequirementNotMet(f"below the quality floor: {found.reason}", hint=f"see {page}")
    if found.verdict == "undecided":
        raise Undecided(
            f"undecided: {found.reason}", hint="add samples with --samples, --questions or --task NAME=FILE"
        )
