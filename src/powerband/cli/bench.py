"""`powerband bench`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import options
from powerband.cli.output import emit, live, out, stderr, warning
from powerband.cli.progress import start_progress, status_line

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.bench.level_controller import LevelStatus
    from powerband.core.measurement import Level, Measurement
    from powerband.runtime.replica import Replica


def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[URL|DEPLOYMENT|MODEL]",
            help="URL of a running server, a deployment.yaml, or a model to start.",
            show_default="golden server",
        ),
    ] = "golden",
    *,
    workload: options.Workload = "chat",
    slo: options.OptionalSlo = None,
    profile: Annotated[
        str,
        typer.Option(
            **options.choice("profile", ("level", "sweep", "climb")),
            help="One load, several rates, or a search for the max rate within the SLO.",
        ),
    ] = "level",
    rate: Annotated[float | None, typer.Option(metavar="PER_S", help="Requests per second; start of a climb.")] = None,
    users: Annotated[
        int | None, typer.Option(metavar="N", help="Closed loop with N concurrent users, instead of a rate.")
    ] = None,
    rates: Annotated[str | None, typer.Option(metavar="R1,R2,...", help="Request rates of a sweep.")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Measured time of each level.", show_default="automatic")
    ] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Requests to measure at each level.")] = None,
    blocks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Repetitions of each level; of a climb, of its answer.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Workload seed; the same seed gives the same requests.")
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=0, metavar="N", help="Client-side limit; time spent waiting for it counts as latency.")
    ] = 0,
    senders: Annotated[int, typer.Option(min=1, metavar="N", help="Client threads; one handles 100,000 tokens/s.")] = 1,
    price: options.Prices = None,
    tokenizer: options.Tokenizer = None,
    engine: options.Engine = None,
    set_: options.Set = None,
    engine_path: options.EnginePath = None,
    ready_timeout: options.ReadyTimeout = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for results.", show_default="a new run directory")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Print an invalid measurement, marked as invalid.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Measure a server under load; refuse to print an invalid number.

    Exit codes: 4 the SLO is missed, 5 a guard rejected the measurement.
    """
    from powerband import inputs

    found, folder = _measure(
        {
            "what": what,
            "workload": workload,
            "slo": slo,
            "profile": profile,
            "rate": rate,
            "users": users,
            "rates": inputs.numbers("--rates", rates) if rates else (),
            "duration": duration,
            "requests": requests,
            "blocks": blocks,
            "seed": seed,
            "max_in_flight": max_in_flight,
            "senders": senders,
            "price": price or (),
            "tokenizer": tokenizer,
            "engine": engine,
            "set": set_ or (),
            "engine_path": engine_path,
            "ready_timeout": ready_timeout,
            "output": output,
            "force": True,  # printed or rejected below
            "command": "powerband " + shlex.join(sys.argv[1:]),
        },
        json=json,
    )
    _finish(found, folder, force=force, json=json)


def _measure(arguments: dict[str, Any], *, json: bool) -> tuple[Measurement, Path]:
    """Return the measurement and its directory; the first Ctrl-C ends it early, a second one exits at once."""
    import asyncio
    import os
    import signal
    import threading

    from powerband import aio
    from powerband.bench import Progress

    stopping, console = threading.Event(), stderr(json=json)
    folders: list[Path] = []

    async def measure() -> Measurement:
        loop, task, ready = asyncio.get_running_loop(), asyncio.current_task(), threading.Event()
        assert task is not None

        def on_signal() -> None:
            if stopping.is_set():
                os._exit(130)
            stopping.set()
            if not ready.is_set():
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        with start_progress(json) as on_change, _View(json) as view:

            def on_start(replica: Replica, event: str) -> None:
                on_change(replica, event)
                if event == "ready":
                    folders.append(replica.directory)
                    ready.set()
                    view.start()

            return await aio.bench(
                **arguments,
                stopping=stopping,
                progress=Progress(view.on_status, view.on_level),
                on_problem=lambda problem: console.print(warning(problem.sentence, problem.hint)),
                on_start=on_start,
                report=console.print,
            )

    try:
        return asyncio.run(measure()), folders[0]
    except asyncio.CancelledError:
        raise SystemExit(130) from None


class _View:
    """Show the levels: a live line on a terminal, and a line for each level that ends."""

    def __init__(self, json: bool) -> None:
        self.console = stderr(json=json)
        self.status = self.console.status("preparing requests") if live() and not json else None

    def __enter__(self) -> _View:
        return self

    def start(self) -> None:
        """Start the live line, once the engine is ready."""
        if self.status:
            self.status.start()

    def __exit__(self, *_: object) -> None:
        if self.status:
            self.status.stop()

    def on_status(self, status: LevelStatus) -> None:
        if self.status:
            self.status.update(status_line(status))

    def on_level(self, level: Level) -> None:
        self.console.print(f"{level.load:>13}  {level.requests:5d} requests in {level.window_s:.1f} s: {level.verdict}")


def _finish(found: Measurement, folder: Path, *, force: bool, json: bool) -> None:
    """Print a valid measurement; raise if it is invalid or misses the SLO."""
    from powerband import aio
    from powerband.errors import RequirementNotMet
    from powerband.reports import console

    page, data = folder / "report.html", folder / "measurement.json"
    rejection = aio.rejected(found)
    shown = found.to_data() if force or not rejection else {}
    if json:
        emit({"measurement": str(data), "report": str(page), "valid": found.valid, **shown})
    elif shown:
        for part in console.measurement(found, force=force):
            out().print(part)
    stderr(json=json).print(f"report: {page}\n  data: {data}")
    if found.interrupted:
        raise SystemExit(130)
    if rejection:
        raise rejection
    if found.slo is not None and found.best is None:
        climb = "" if found.profile == "climb" else "; --profile climb finds the max rate within it"
        raise RequirementNotMet("the SLO is missed", hint=f"see {page}{climb}")
