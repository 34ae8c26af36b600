"""`powerband evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import given
from powerband.cli.output import Json, emit, out, talk

if TYPE_CHECKING:
    from powerband.core.quality import QualityFloor
    from powerband.evaluators.tasks import Question


def evaluate(
    candidate: Annotated[str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="What would be served.")],
    *,
    reference: Annotated[str, typer.Option(help="The deployment or model that it must not fall behind.")],
    floor: Annotated[str, typer.Option(help="A quality.yaml, or strict, balanced or lenient.")] = "balanced",
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Questions with answers, as JSONL; may stand again."),
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Also judge on the requests of this workload.")] = None,
    samples: Annotated[int, typer.Option(min=4, max=48, help="Texts of each class, and twice as many as chats.")] = 24,
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
    from powerband.reports import judged
    from powerband.store import runs

    prepared = []
    for what, name, settings in ((reference, None, []), (candidate, engine, set_ or [])):
        deployment = given.deployment(what, engine=name, settings=settings, host=None, port=None)
        prepared.append(local.prepare(deployment))
    wanted = _floor(floor)
    questions = dict(_task(text) for text in task or [])
    own = _requests(workload, prepared[0].deployment.variant.source) if workload else []
    order = stage.Order(floor=wanted, probes=probes(own, samples=samples), tasks=questions)
    folder = given.folder(output) if output else runs.new_run(f"evaluate-{prepared[1].deployment.served_name}")
    console = talk()

    def progress(said: str) -> None:
        if not json:
            console.print(f"[dim]{said}[/]")

    found = asyncio.run(stage.evaluate(prepared[0], prepared[1], order, progress=progress))
    page, data = Path(folder) / "evaluation.html", Path(folder) / "evaluation.json"
    data.write_text(found.to_json())
    page.write_text(judged.page(found))
    if json:
        emit(found.to_data())
    else:
        for part in judged.tables(found):
            out().print(part)
        console.print(f"report: {page}\n  data: {data}")
    if found.verdict == "fail":
        raise PromiseBroken(f"below the floor: {found.reason}", hint=f"see {page}")
    if found.verdict == "undecided":
        raise InvalidMeasurement(f"undecided: {found.reason}", hint="give --task NAME=FILE, or another floor")


def _floor(text: str) -> QualityFloor:
    from powerband.core.quality import QualityFloor
    from powerband.store import documents

    found = documents.find("quality", text)
    assert isinstance(found, QualityFloor)
    return found


def _task(text: str) -> tuple[str, tuple[Question, ...]]:
    """Read NAME=FILE."""
    from pathlib import Path

    from powerband.errors import InputError
    from powerband.evaluators import tasks

    name, _, file = text.rpartition("=")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"there is no task file {file}", hint="write --task NAME=FILE")
    return name or path.stem, tasks.read(path.read_text(), source=file)


def _requests(workload: str, source: str) -> list[str]:
    """Return what a workload's users write."""

    from powerband.load import prompts, tokens

    document = given.traffic(workload, rate=None, users=None)
    traffic = prompts.prepare(document, 48, vocabulary=tokens.vocabulary(source), base=given.base(workload))
    return traffic.texts()
