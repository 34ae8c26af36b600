"""`powerband tune`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Group

    from powerband.core.recipe import Recipe
    from powerband.core.study import Settings, Study, Trial
    from powerband.tune import TuneSpec
    from powerband.tune.search_space import SearchSpace

_PROFILES = {"chat": "interactive", "batch": "batch", "hybrid": "reading-speed"}


def tune(
    model: Annotated[str, typer.Argument(help="A model folder or a GGUF file.")],
    *,
    workload: Annotated[str, typer.Option(help="A workload.yaml, or a name of the catalogue.")] = "chat",
    slo: Annotated[str | None, typer.Option(help="An slo.yaml, or a name of the catalogue.")] = None,
    profile: Annotated[str, typer.Option(help="Where no SLO is given: chat, batch or hybrid.")] = "chat",
    quality: Annotated[str, typer.Option(help="A quality.yaml, strict, balanced or lenient; 'none' for no floor.")] = (
        "balanced"
    ),
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="The data of a task that the floor asks for.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="Where to search; only this-machine can be measured from here.")
    ] = "this-machine",
    engine: Annotated[list[str] | None, typer.Option(help="Only this engine; may stand again.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Only this number format; may stand again.")] = None,
    budget: Annotated[
        str, typer.Option(help="How long search and contest may take; the gate and the last proof add some minutes.")
    ] = "2h",
    trials: Annotated[int | None, typer.Option(min=1, help="How many deployments to start at most.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests to measure at each load at least.")] = None,
    launcher: Annotated[str, typer.Option(help="Where trials run: local, or ray, on every node at once.")] = "local",
    cluster: Annotated[str, typer.Option(help="The address of the Ray cluster.")] = "auto",
    price: Annotated[float | None, typer.Option(help="What this machine costs per hour, in dollars.")] = None,
    seed: Annotated[int, typer.Option(help="Another search.")] = 0,
    output: Annotated[str, typer.Option(help="The folder of the study.")] = "study",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study that lies in the folder.")] = False,
    json: Json = False,
) -> None:
    """Search this machine for the cheapest deployment that keeps the SLO and the quality floor, and prove it.

    Exit code 4: nothing that was tried keeps both.
    """
    from powerband.errors import InputError, did_you_mean
    from powerband.tune import TuneSpec

    if profile not in _PROFILES:
        raise InputError(
            f"there is no profile '{profile}'.{did_you_mean(profile, _PROFILES)}", hint="chat, batch or hybrid"
        )
    if on != "this-machine":
        raise InputError(f"{on} cannot be measured from here", hint=f"run tune on it, or 'powerband plan --on {on}'")
    folder = inputs.folder(output)
    if not resume and (folder / "trials.jsonl").exists():
        raise InputError(f"{folder} holds a study", hint="go on with --resume, or give another --output")
    floor = None if quality == "none" else inputs.floor(quality)
    order = TuneSpec(
        model=model,
        workload=inputs.traffic(workload, rate=None, users=None),
        slo=inputs.promise(slo or _PROFILES[profile]),
        floor=floor,
        tasks=inputs.exams(task or [], floor, source=model, most=200),
        engines=tuple(engine or ()),
        schemes=tuple(scheme or ()),
        budget_s=inputs.seconds(budget),
        most_trials=trials,
        requests=requests,
        usd_per_h=price,
        seed=seed,
        base=inputs.base(workload),
        cluster=inputs.cluster(launcher, cluster),
    )
    study, recipe = _run(order, folder, json=json)
    _leave(study, recipe, folder, json=json)


def _run(order: TuneSpec, folder: Path, *, json: bool) -> tuple[Study, Recipe]:
    """Tune; the first Ctrl-C ends it in an orderly way, and what was found stays."""
    import asyncio
    import os
    import signal
    import threading

    from powerband import tune as stage

    stopping = threading.Event()

    async def run() -> tuple[Study, Recipe]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if stopping.is_set():
                os._exit(130)
            stopping.set()
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        with _View(order.budget_s, json=json) as view:
            listener = stage.Progress(view.on_space, view.on_try, view.on_trials, view.say)
            return await stage.tune(order, folder=folder, stopping=stopping, listener=listener)

    try:
        return asyncio.run(run())
    except (asyncio.CancelledError, KeyboardInterrupt):
        stderr().print(f"stopped; go on with: powerband tune ... --output {folder} --resume")
        raise SystemExit(130) from None


class _View:
    """The study as it runs: live on a terminal, a line a trial elsewhere, nothing beside JSON."""

    def __init__(self, budget_s: float, *, json: bool) -> None:
        from rich.live import Live

        self.console, self.json, self.budget_s = stderr(), json, budget_s
        self.trials: Sequence[Trial] = ()
        self.began, self.said, self.trying = time.monotonic(), "", ""
        self.live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=2, transient=True)

    def __enter__(self) -> _View:
        if self.console.is_terminal and not self.json:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def on_space(self, levers: SearchSpace) -> None:
        if not self.json:
            engines = ", ".join(levers.by_engine)
            self.console.print(f"{len(levers)} deployments are possible on {engines}")

    def on_try(self, number: int, settings: Settings) -> None:
        self.trying = f"trial {number}: {', '.join(settings.values())}"
        self.say("prepare")

    def on_trials(self, trials: Sequence[Trial]) -> None:
        from powerband.reports import study as study_report

        if len(trials) > len(self.trials) and not self.json and not self.live.is_started:
            self.console.print(study_report.line(trials[-1]))
        self.trials, self.trying = list(trials), ""

    def say(self, said: str) -> None:
        if self.said != said and not self.json and not self.live.is_started:
            self.console.print(f"[dim]{time.monotonic() - self.began:7.0f} s  {said}[/]")
        self.said = said

    def _draw(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        from powerband.reports import study as study_report

        spent = time.monotonic() - self.began
        left = max(0.0, self.budget_s - spent) / 60
        status = Text.assemble((self.trying, "bold"), f"  {self.said}")
        gone = f"{len(self.trials)} trials, {spent / 60:.0f} min gone, about {left:.0f} left"
        return Group(
            study_report.trials(self.trials, most=12), status, Text(f"{gone}  (Ctrl-C stops, --resume goes on)", "dim")
        )


def _leave(study: Study, recipe: Recipe, folder: Path, *, json: bool) -> None:
    from powerband.reports import study as study_report
    from powerband.store.journal import Journal

    page = folder / "report.html"
    blocks = Journal(folder / "finals.jsonl").read()
    page.write_text(study_report.page(study, recipe, blocks))
    if json:
        emit(recipe.to_data())
        return
    for part in study_report.tables(study, recipe):
        out().print(part)
    stderr().print(
        f"recipe: {folder / 'recipe.yaml'}\nreport: {page}\nagain:  powerband verify {folder / 'recipe.yaml'}"
    )
