"""`powerband evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr


def evaluate(
    candidate: Annotated[str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="What would be served.")],
    *,
    reference: Annotated[str, typer.Option(help="The deployment or model that it must not fall behind.")],
    floor: Annotated[str, typer.Option(help="A quality.yaml, or strict, balanced or lenient.")] = "balanced",
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Questions as JSONL, or the data of gsm8k, mmlu, ifeval, humaneval or wikitext; may stand again.",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=20, help="How many of each task at most.")] = 200,
    whole: Annotated[bool, typer.Option("--whole", help="Ask everything, however clear the verdict is.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Ask anew what was judged before.")] = False,
    run_code: Annotated[bool, typer.Option("--run-code", help="Let humaneval run what the model writes.")] = False,
    workload: Annotated[str | None, typer.Option(help="Also judge on the requests of this workload.")] = None,
    samples: Annotated[int, typer.Option(min=8, max=40, help="Texts of each class, and chats of each kind.")] = 24,
    engine: Annotated[str | None, typer.Option(help="The candidate's engine; guessed from the model.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="A knob of the candidate; may stand again.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Where evaluation.json and the page go.")] = None,
    json: Json = False,
) -> None:
    """Judge a deployment as it will be served: do its answers hold against the reference?

    Exit code 4: it falls below the floor. 3: it could not be decided.
    """
    import asyncio
    from pathlib import Path

    from powerband import evaluate as stage
    from powerband.errors import InvalidMeasurement, PromiseBroken
    from powerband.evaluate.probes import probes
    from powerband.launchers import local
    from powerband.reports import evaluation
    from powerband.store import runs

    prepared = []
    for what, name, settings in ((reference, None, []), (candidate, engine, set_ or [])):
        deployment = inputs.deployment(what, engine=name, settings=settings, host=None, port=None)
        prepared.append(local.prepare(deployment))
    wanted = inputs.floor(floor)
    exams = inputs.exams(
        task or [],
        wanted,
        source=prepared[0].deployment.variant.source,
        most=questions,
        tells_prompts=all(one.engine.tells_prompts for one in prepared),
        run_code=run_code,
    )
    own = _requests(workload, prepared[0].deployment.variant.source) if workload else []
    order = stage.EvaluateSpec(floor=wanted, probes=probes(own, samples=samples), tasks=exams, whole=whole, again=again)
    folder = inputs.folder(output) if output else runs.new_run(f"evaluate-{prepared[1].deployment.served_name}")
    console = stderr()

    def progress(said: str) -> None:
        if not json:
            console.print(f"[dim]{said}[/]")

    found = asyncio.run(stage.evaluate(prepared[0], prepared[1], order, progress=progress))
    page, data = Path(folder) / "evaluation.html", Path(folder) / "evaluation.json"
    data.write_text(found.to_json())
    page.write_text(evaluation.page(found))
    if json:
        emit(found.to_data())
    else:
        for part in evaluation.tables(found):
            out().print(part)
        console.print(f"report: {page}\n  data: {data}")
    if found.verdict == "fail":
        raise PromiseBroken(f"below the floor: {found.reason}", hint=f"see {page}")
    if found.verdict == "undecided":
        raise InvalidMeasurement(f"undecided: {found.reason}", hint="give --task NAME=FILE, or another floor")


def _requests(workload: str, source: str) -> list[str]:
    """Return what a workload's users write."""

    from powerband.load import prompts, tokens

    document = inputs.traffic(workload, rate=None, users=None)
    traffic = prompts.prepare(document, 48, vocabulary=tokens.vocabulary(source), base=inputs.base(workload))
    return traffic.texts()
