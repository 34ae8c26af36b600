"""`powerband tune`."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import options
from powerband.cli.output import duration, emit, live, out, stderr, verbosity
from powerband.cli.progress import status_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Group, RenderableType

    from powerband.bench.level_controller import LevelStatus
    from powerband.core.recipe import Recipe
    from powerband.core.study import Settings, Trial
    from powerband.tune.search_space import SearchSpace


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, GGUF file, or hub id.")],
    *,
    workload: options.Workload = "chat",
    slo: options.Slo = "interactive",
    quality: options.Quality = "balanced",
    task: options.Tasks = None,
    on: Annotated[
        str, typer.Option(metavar="DEVICE[:N]", help="Where trials run: this machine; with --rehearse, any device.")
    ] = "this-machine",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Only play the study in virtual time: its duration, cost and result.")
    ] = False,
    engine: options.Engines = None,
    scheme: options.Schemes = None,
    budget: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Time for search, quality checks and validation, without quantizing."),
    ] = "2h",
    trials: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of trials.")] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Minimum number of requests at each load.")] = None,
    launcher: options.Launcher = "local",
    cluster: options.Cluster = "auto",
    price: options.Prices = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the search; the same seed and trials give the same choices.")
    ] = 0,
    output: Annotated[str, typer.Option(metavar="DIR", help="Directory of the study.")] = "study",
    resume: Annotated[bool, typer.Option("--resume", help="Resume the study in --output.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the cheapest deployment within the SLO and quality floor.

    Trials run on real engines; the best configurations are validated on held-out requests.
    The result is a recipe.yaml with its evidence. Exit code 4: no configuration meets both.
    """
    from pathlib import Path

    from powerband import inputs
    from powerband.errors import InputError

    shared = {
        "model": model,
        "workload": workload,
        "slo": slo,
        "quality": quality,
        "on": on,
        "engine": engine or (),
        "scheme": scheme or (),
        "budget": budget,
        "trials": trials,
        "requests": requests,
        "price": price or (),
        "seed": seed,
    }
    options.print_never_run(engine or (), json=json)
    if rehearse:
        if task or resume or launcher != "local":
            raise InputError(
                "--rehearse does not play --task, --resume and --launcher",
                hint="omit them: it plays a whole study here",
            )
        _rehearse(shared, json=json)
        return
    own = {"task": task or (), "launcher": launcher, "cluster": cluster, "output": output, "resume": resume}
    recipe = _run({**shared, **own}, budget_s=inputs.seconds(budget), json=json)
    _finish(recipe, Path(output), json=json)


def _rehearse(arguments: dict[str, Any], *, json: bool) -> None:
    """Play the study in virtual time and print what it would take and find."""
    import asyncio

    from powerband import aio
    from powerband.reports import rehearsal

    console = stderr(json=json)
    found = asyncio.run(aio.rehearse(**arguments, report=lambda message: console.print(f"[dim]{message}[/]")))
    if json:
        emit(found.model_dump(mode="json"))
        return
    for part in rehearsal.parts(found):
        out().print(part)


def _run(arguments: dict[str, Any], *, budget_s: float, json: bool) -> Recipe:
    """Run the study; the first Ctrl-C stops it cleanly, and its results stay on disk."""
    import asyncio
    import os
    import signal
    import threading
    from pathlib import Path

    from powerband import aio
    from powerband.cli.engine import step_printer
    from powerband.errors import InvalidMeasurement, RequirementNotMet
    from powerband.tune import Progress

    stopping = threading.Event()

    async def run() -> Recipe:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if stopping.is_set():
                os._exit(130)
            stopping.set()
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        with _View(budget_s, json=json) as view:
            progress = Progress(view.on_space, view.on_trial_start, view.on_trials, view.report, view.on_status)
            on_step = step_printer("lm-eval: ", json=json)
            return await aio.tune(**arguments, stopping=stopping, progress=progress, on_step=on_step)

    try:
        return asyncio.run(run())
    except (RequirementNotMet, InvalidMeasurement):
        _show_trials(Path(arguments["output"]), json=json)
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        again = shlex.join([*(one for one in sys.argv[1:] if one != "--resume"), "--resume"])
        stderr(json=json).print(f"stopped; continue with: powerband {again}")
        raise SystemExit(130) from None


class _View:
    """The study while it runs: a live view on a terminal, otherwise a line for each step and trial."""

    def __init__(self, budget_s: float, *, json: bool) -> None:
        from rich.live import Live

        self.console, self.budget_s = stderr(json=json), budget_s
        self.trials: Sequence[Trial] = ()
        self.defaults: dict[str, Settings] = {}
        self.began = self.trial_began = time.monotonic()
        self.title, self.message = "", "prepare the study"
        self.level: LevelStatus | None = None
        self.live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=2, transient=True)
        self.drawn = live() and not json

    def __enter__(self) -> _View:
        if self.drawn:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def on_space(self, space: SearchSpace, expected: str) -> None:
        self.defaults = space.all_defaults
        self.console.print(expected, highlight=False)

    def on_trial_start(self, number: int, settings: Settings) -> None:
        from powerband.core.study import render_settings

        self.title, self.trial_began = f"trial {number}  {render_settings(settings, self.defaults)}", time.monotonic()
        if not self.drawn:
            self.console.print(f"[dim]{self._elapsed()}[/]  {self.title}")
        self.report("prepare the weights")

    def on_trials(self, trials: Sequence[Trial]) -> None:
        from powerband.reports import study as study_report

        if trials and list(trials[-1:]) != list(self.trials[-1:]) and not self.drawn:
            self.console.print(study_report.line(trials[-1], self.defaults))
        self.trials, self.title, self.level = list(trials), "", None

    def on_status(self, status: LevelStatus) -> None:
        self.level = status

    def report(self, message: str) -> None:
        detail = message.startswith("start the engine: ")  # each phase of a start: only with -v
        if self.message != message and not self.drawn and (verbosity() > 0 or not detail):
            self.console.print(f"[dim]{self._elapsed()}  {message}[/]")
        self.message, self.level = message, None

    def _elapsed(self) -> str:
        return f"{duration(time.monotonic() - self.began):>12}"

    def _draw(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        from powerband.reports import study as study_report

        now = time.monotonic()
        left = duration(max(0.0, self.budget_s - (now - self.began)))
        trial = Text.assemble((self.title or "validation", "bold"), (f"  {duration(now - self.trial_began)}", "dim"))
        table: list[RenderableType] = (
            [study_report.trials(self.trials, self.defaults, last=12), ""] if self.trials else []
        )
        return Group(
            *table,
            trial,
            status_line(self.level) if self.level else Text(f"  {self.message}"),
            Text(
                f"{duration(now - self.began)} of the budget used, {left} left; Ctrl-C stops, --resume continues", "dim"
            ),
        )


def _show_trials(folder: Path, *, json: bool) -> None:
    """Print the trials of a study without a recipe, and how near each came."""
    from powerband.core.study import Study
    from powerband.reports import study as study_report
    from powerband.store import documents

    if (folder / "study.json").exists() and not json:
        for part in study_report.tables(documents.read_as(Study, folder / "study.json"), None):
            out().print(part)
        stderr().print(f"report: {folder / 'report.html'}")


def _finish(recipe: Recipe, folder: Path, *, json: bool) -> None:
    from powerband.core.study import Study
    from powerband.reports import study as study_report
    from powerband.store import documents

    if json:
        emit(recipe.to_data())
        return
    for part in study_report.tables(documents.read_as(Study, folder / "study.json"), recipe):
        out().print(part)
    stderr().print(
        f"recipe: {folder / 'recipe.yaml'}\nreport: {folder / 'report.html'}\n"
        f"verify: powerband verify {folder / 'recipe.yaml'}"
    )
