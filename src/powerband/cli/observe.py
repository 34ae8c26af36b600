"""`powerband observe` and `powerband capture`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from powerband.core.recipe import Recipe
    from powerband.evaluate.tasks import Task
    from powerband.observe import Exams, Observation
    from powerband.observe.retune import RetunePolicy
    from powerband.rollout import Verdict


def observe(
    fleet: Annotated[str, typer.Argument(help="The folder of a fleet that runs with --capture.")],
    *,
    model: Annotated[str | None, typer.Option(help="Which one, where the fleet serves several.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also hold a replica's answers against the reference.")
    ] = False,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="The data of a task that the floor asks for.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Keep watching: tune for changed traffic while nobody asks, and roll out.")
    ] = False,
    every: Annotated[str, typer.Option(help="How often --auto looks.")] = "10min",
    idle: Annotated[str, typer.Option(help="How long nobody may have asked before --auto tunes.")] = "60s",
    budget: Annotated[str, typer.Option(help="How long a study of --auto may take.")] = "1h",
    requests: Annotated[int, typer.Option(min=1, help="Of --auto's trial: so many no worse than before.")] = 100,
    json: Json = False,
) -> None:
    """Is the traffic still what the recipe was proven with? Exit code 4: it drifted, or a promise is broken."""
    from pathlib import Path

    from powerband.errors import PromiseBroken
    from powerband.observe.retune import RetunePolicy

    folder = Path(fleet)

    def exams(recipe: Recipe) -> dict[str, Task]:
        return inputs.exams(task or [], recipe.promise.quality, source=recipe.model, most=200)

    if auto:
        terms = RetunePolicy(inputs.seconds(budget), idle_s=inputs.seconds(idle), requests=requests)
        _watch(folder, model, terms, exams, every_s=inputs.seconds(every), json=json)
        return
    found = _look(folder, model, probe=exams if probe else None, json=json)
    if json:
        _emit(found)
        raise typer.Exit(0 if found.found == "in region" else PromiseBroken.exit_code)
    if found.found != "in region":
        raise PromiseBroken(
            f"{found.found}: {'; '.join(found.said())}",
            hint=f"powerband capture {fleet}; powerband tune {found.recipe.model} --workload captured.yaml",
        )
    out().print(f"[bold green]in region[/]  {found.requests} requests are like those that the recipe was proven with")


def _look(folder: Path, model: str | None, *, probe: Exams | None = None, json: bool) -> Observation:
    """Hold a fleet against its recipe as it is now."""
    import asyncio

    from powerband import observe as stage

    return asyncio.run(stage.observe_once(folder, model, probe=probe, say=_sayer(json=json)))


def _sayer(*, json: bool) -> Callable[[str], None]:
    console = stderr()

    def say(said: str) -> None:
        if not json:
            console.print(f"[dim]{time.strftime('%T')}  {said}[/]")

    return say


def _emit(found: Observation) -> None:
    axes = [{"axis": one.axis, "side": one.side, "since": one.since_s, "request": one.request} for one in found.drifted]
    emit({"found": found.found, "requests": found.requests, "drifted": axes, "broken": found.broken})


def _watch(folder: Path, model: str | None, terms: RetunePolicy, exams: Exams, *, every_s: float, json: bool) -> None:
    """Look again and again; act where it must be, and not again before as much traffic was seen."""
    import asyncio

    from powerband.errors import PowerbandError
    from powerband.observe import retune

    say, seen = _sayer(json=json), 0
    while True:
        found = _look(folder, model, json=json)
        since = retune.enough(found) if found.found != "in region" and found.requests >= 2 * seen else []
        if json:
            _emit(found)
        say("; ".join((f"{found.found}, {found.requests} requests", *found.said())))
        if since:
            seen = found.requests
            try:
                verdict = asyncio.run(retune.retune(folder, model, found, since, terms, exams=exams, say=say))
            except PowerbandError as error:
                say(f"not mended: {error.message}")
                if json:
                    emit({"error": error.message, "hint": error.hint})
            else:
                seen = 0 if verdict.promoted else seen
                _tell(verdict, json=json)
        time.sleep(every_s)


def _tell(verdict: Verdict, *, json: bool) -> None:
    if json:
        emit({"promoted": verdict.promoted, "reason": verdict.reason, "answered": verdict.answered})
    else:
        out().print(f"{'promoted' if verdict.promoted else 'rolled back'}: {verdict.reason}")


def capture(
    fleet: Annotated[str, typer.Argument(help="The folder of a fleet that runs with --capture.")],
    *,
    model: Annotated[str | None, typer.Option(help="Which one, where the fleet serves several.")] = None,
    output: Annotated[str, typer.Option(help="The folder for the workload and its trace.")] = ".",
    name: Annotated[str, typer.Option(help="The workload's name.")] = "captured",
    json: Json = False,
) -> None:
    """Write a fleet's traffic as a workload: lengths, times and shared beginnings. Nobody's words are in it."""
    from pathlib import Path

    from powerband import observe as stage
    from powerband.observe.capture import capture as captured
    from powerband.serve.spec import FleetSpec

    part = FleetSpec.read(Path(fleet)).part(model)
    path = captured(stage.notes(Path(fleet), part), inputs.folder(output), name=name)
    if json:
        emit({"workload": str(path)})
    else:
        print(path)
