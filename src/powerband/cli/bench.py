"""`powerband bench`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr, warning

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.bench import BenchSpec
    from powerband.bench.level_controller import LevelController, Plan
    from powerband.core.measurement import Level, Measurement
    from powerband.launchers.local import Prepared
    from powerband.load.generator import LoadProgress


def bench(
    what: Annotated[
        str, typer.Argument(metavar="[URL|DEPLOYMENT|MODEL]", help="A server's URL, a deployment.yaml, or a model.")
    ] = "golden",
    *,
    workload: Annotated[str, typer.Option(help="A workload.yaml, or a name of the catalogue.")] = "chat",
    slo: Annotated[str | None, typer.Option(help="An slo.yaml, or a name of the catalogue.")] = None,
    profile: Annotated[
        str, typer.Option(help="level, sweep, or climb: the highest rate that keeps the SLO.")
    ] = "level",
    rate: Annotated[float | None, typer.Option(help="Requests per second; a climb starts here.")] = None,
    users: Annotated[int | None, typer.Option(help="A closed loop of so many users instead of a rate.")] = None,
    rates: Annotated[str | None, typer.Option(help="The rates of a sweep, such as 1,2,4.")] = None,
    duration: Annotated[str | None, typer.Option(help="How long to measure each level.", show_default="enough")] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests to measure at each level.")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Measure each level (of a climb: the answer) so many times.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Other requests of the same kind.")] = None,
    max_in_flight: Annotated[int, typer.Option(min=0, help="Hold back what exceeds this; its wait is counted.")] = 0,
    senders: Annotated[int, typer.Option(min=1, help="Threads that send; one carries 100,000 tokens/s.")] = 1,
    price: Annotated[float | None, typer.Option(help="What the machine costs per hour.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Model folder or GGUF whose tokenizer counts.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm, llamacpp, openai or fake; guessed from the model.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="An engine knob; may stand again.")
    ] = None,
    engine_path: Annotated[str | None, typer.Option(help="Use this binary or interpreter as the engine.")] = None,
    ready_timeout: Annotated[str, typer.Option(help="How long a start may take.")] = "600s",
    output: Annotated[str | None, typer.Option(help="Where the results go.", show_default="a new state folder")] = None,
    force: Annotated[bool, typer.Option("--force", help="Print an invalid number, marked as such.")] = False,
    json: Json = False,
) -> None:
    """Measure a server under load, and refuse to print a number that is not true.

    Exit code 3: a guard refused the measurement. 4: the SLO was not kept.
    """
    import asyncio
    from typing import get_args

    from powerband.bench import BenchSpec, Profile
    from powerband.bench.profiles import Amount
    from powerband.errors import InputError, did_you_mean
    from powerband.launchers import local
    from powerband.plan import expect
    from powerband.store import runs

    if what == "golden" and engine is None:
        engine = "fake"
    if profile not in get_args(Profile):
        raise InputError(
            f"there is no profile '{profile}'.{did_you_mean(profile, get_args(Profile))}", hint="level, sweep or climb"
        )
    order = BenchSpec(
        workload=inputs.traffic(workload, rate=None if profile == "climb" else rate, users=users),
        slo=inputs.promise(slo) if slo else None,
        profile=profile,  # type: ignore[arg-type]
        rates=inputs.numbers("--rates", rates) if rates else (),
        start_per_s=rate,
        amount=Amount(window_s=inputs.seconds(duration) if duration else None, requests=requests, seed=seed),
        base=inputs.base(workload),
        blocks=blocks,
        limit=max_in_flight,
        senders=senders,
        price_per_h=price,
        tokenizer=tokenizer,
        command="powerband " + shlex.join(sys.argv[1:]),
    )
    deployment = inputs.deployment(what, engine=engine, settings=set_ or [], host=None, port=None)
    prepared = local.prepare(deployment, engine_path=engine_path)
    for problem in prepared.problems:
        stderr().print(warning(problem.sentence, problem.hint))
    directory = inputs.folder(output) if output else runs.new_run(f"bench-{deployment.served_name}")
    found = asyncio.run(
        _measure(prepared, order, directory=directory, ready_timeout_s=inputs.seconds(ready_timeout), json=json)
    )
    found = expect.beside(found, deployment, model=prepared.model, host=prepared.host, base=order.base)
    _leave(found, directory, force=force, json=json)


async def _measure(
    prepared: Prepared, order: BenchSpec, *, directory: Path, ready_timeout_s: float, json: bool
) -> Measurement:
    """Start the server, measure it, stop it; the first Ctrl-C ends the measuring and keeps what there is."""
    import asyncio
    import os
    import signal
    import threading

    from powerband import bench as stage
    from powerband.launchers import local

    stopping, loop, task = threading.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    measuring = False

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()
        if not measuring:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        with inputs.start_progress(json) as on_change:
            async with local.launch(
                prepared, directory=directory, ready_timeout_s=ready_timeout_s, on_change=on_change
            ) as replica:
                measuring = True
                with _Shown(json) as shown:
                    listener = stage.Progress(shown.progress, shown.level)
                    return await stage.bench(
                        replica, prepared, order, directory=directory, stopping=stopping, listener=listener
                    )
    except asyncio.CancelledError:
        raise SystemExit(130) from None


class _Shown:
    """Show how far it is: a live line on a terminal, a line a level elsewhere, nothing beside JSON."""

    def __init__(self, json: bool) -> None:
        self.console, self.json = stderr(), json
        self.status = self.console.status("preparing") if self.console.is_terminal and not json else None

    def __enter__(self) -> _Shown:
        if self.status:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status:
            self.status.stop()

    def progress(self, plan: Plan, progress: LoadProgress, steering: LevelController) -> None:
        if not self.status:
            return
        now = progress.elapsed_s
        if steering.warm_s is None:
            phase = f"warming up, {now:.0f} s"
        elif plan.counted and steering.over_s is None:
            phase = f"measuring, {max(0, plan.requests - steering.counted)} requests left"
        elif now < steering.end_s:
            phase = f"measuring, {steering.end_s - now:.0f} s left"
        else:
            phase = f"waiting for the last answers, {progress.in_flight} in flight"
        self.status.update(
            f"{steering.load}: {phase}, {progress.finished} answered  [dim](Ctrl-C keeps what there is)[/]"
        )

    def level(self, level: Level) -> None:
        if self.json:
            return
        self.console.print(f"{level.load:>13}  {level.requests:5d} requests in {level.window_s:.1f} s: {level.verdict}")


def _leave(found: Measurement, directory: Path, *, force: bool, json: bool) -> None:
    """Write the files, print what may be printed, and leave by the verdict."""
    from powerband.errors import InvalidMeasurement, PromiseBroken
    from powerband.reports import console, html

    (directory / "measurement.json").write_text(found.to_json())
    (directory / "report.html").write_text(html.measurement(found))
    broken = found.slo is not None and found.best is None
    refused = [one for level in found.levels for one in level.refused]
    answers = found.valid or (found.profile == "climb" and broken)
    if json:
        emit({"measurement": str(directory / "measurement.json"), "report": str(directory / "report.html"),
              "valid": found.valid, **(found.to_data() if answers or force else {})})  # fmt: skip
    elif answers or force:
        for part in console.measurement(found, force=force):
            out().print(part)
    if not json:
        stderr().print(f"report: {directory / 'report.html'}\n  data: {directory / 'measurement.json'}")
    if found.interrupted:
        raise SystemExit(130)
    if not answers:
        said = "; ".join(dict.fromkeys(one.sentence for one in refused)) or "nothing was measured"
        raise InvalidMeasurement(
            f"no valid number: {said}",
            hint=(refused[0].hint if refused else "") + "; --force prints it, marked invalid",
        )
    if broken:
        further = "" if found.profile == "climb" else "; --profile climb finds what is"
        raise PromiseBroken("the SLO was not kept", hint=f"see {directory / 'report.html'}{further}")
