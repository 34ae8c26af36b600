"""`powerband observe` and `powerband capture`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from powerband.core.recipe import Recipe
    from powerband.evaluate.tasks import Task
    from powerband.observe import Observation, TaskLoader
    from powerband.observe.retune import RetunePolicy
    from powerband.rollout import RolloutResult


def observe(
    fleet: options.FleetDir,
    *,
    model: options.ModelOfFleet = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also compare a replica's answers with the reference.")
    ] = False,
    task: options.Tasks = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Keep observing; after drift, re-tune while the fleet is idle and roll out.")
    ] = False,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="With --auto: time between checks.")] = "10min",
    idle: Annotated[
        str, typer.Option(metavar="DURATION", help="With --auto: time without requests before tuning starts.")
    ] = "60s",
    budget: Annotated[str, typer.Option(metavar="DURATION", help="With --auto: time budget of a study.")] = "1h",
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --auto: requests that the canary must serve.")
    ] = 100,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Compare a fleet's traffic with the recipe's validity region.

    The fleet must run with --capture. Exit code 4: the traffic drifted or a promise is broken.
    """
    from pathlib import Path

    from powerband import inputs
    from powerband.errors import RequirementNotMet
    from powerband.observe.retune import RetunePolicy

    folder = Path(fleet)

    def tasks(recipe: Recipe) -> dict[str, Task]:
        return inputs.tasks(task or [], recipe.promise.quality, source=recipe.model)

    if auto:
        policy = RetunePolicy(inputs.seconds(budget), idle_s=inputs.seconds(idle), requests=requests)
        _watch(folder, model, policy, tasks, interval_s=inputs.seconds(interval), json=json)
        return
    found = _observe_once(folder, model, probe=tasks if probe else None, json=json)
    if json:
        _emit(found)
        raise typer.Exit(0 if found.verdict == "in region" else RequirementNotMet.exit_code)
    if found.verdict != "in region":
        raise RequirementNotMet(
            f"{found.verdict}: {'; '.join(found.problems())}",
            hint=f"re-tune: powerband capture {fleet}; powerband tune {found.recipe.model} --workload captured.yaml",
        )
    out().print(
        f"[bold green]in region[/]  {found.requests} requests match the traffic that the recipe was measured with"
    )


def _observe_once(folder: Path, model: str | None, *, probe: TaskLoader | None = None, json: bool) -> Observation:
    """Compare the captured traffic with the recipe once."""
    import asyncio

    from powerband import observe as stage

    return asyncio.run(stage.observe_once(folder, model, probe=probe, report=_reporter(json=json)))


def _reporter(*, json: bool) -> Callable[[str], None]:
    console = stderr(json=json)

    def report(message: str) -> None:
        console.print(f"[dim]{time.strftime('%T')}  {message}[/]")

    return report


def _emit(found: Observation) -> None:
    axes = [{"axis": one.axis, "side": one.side, "since": one.since_s, "request": one.request} for one in found.drifted]
    emit({"found": found.verdict, "requests": found.requests, "drifted": axes, "broken": found.broken})


def _watch(
    folder: Path, model: str | None, policy: RetunePolicy, tasks: TaskLoader, *, interval_s: float, json: bool
) -> None:
    """Observe periodically; re-tune on drift, and after a failed attempt only once the traffic has doubled."""
    import asyncio

    from powerband.errors import PowerbandError
    from powerband.observe import retune

    report, seen = _reporter(json=json), 0
    while True:
        found = _observe_once(folder, model, json=json)
        drifted = found.verdict != "in region" and found.requests >= 2 * seen
        since = retune.requests_since_drift(found) if drifted else []
        if json:
            _emit(found)
        report("; ".join((f"{found.verdict}, {found.requests} requests", *found.problems())))
        if since:
            seen = found.requests
            try:
                result = asyncio.run(
                    retune.retune(folder, model, found, since, policy, load_tasks=tasks, report=report)
                )
            except PowerbandError as error:
                report(f"re-tuning failed: {error.message}")
                if json:
                    emit({"error": error.message, "hint": error.hint})
            else:
                seen = 0 if result.promoted else seen
                _print_result(result, json=json)
        time.sleep(interval_s)


def _print_result(result: RolloutResult, *, json: bool) -> None:
    if json:
        emit({"promoted": result.promoted, "reason": result.reason, "answered": result.answered})
    else:
        out().print(f"{'promoted' if result.promoted else 'rolled back'}: {result.reason}")


def capture(
    fleet: options.FleetDir,
    *,
    model: options.ModelOfFleet = None,
    output: Annotated[str, typer.Option(metavar="DIR", help="Directory for the workload and its trace.")] = ".",
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the workload.")] = "captured",
    json: options.Json = False,
) -> None:
    """Write a fleet's traffic as a workload file; no prompt text.

    The workload holds lengths, arrival times and shared prefixes. The fleet must run with --capture.
    """
    from pathlib import Path

    from powerband import inputs
    from powerband import observe as stage
    from powerband.observe.capture import capture as captured
    from powerband.serve.spec import FleetSpec

    spec = FleetSpec.read(Path(fleet)).model(model)
    path = captured(stage.read_records(Path(fleet), spec), inputs.folder(output), name=name)
    if json:
        emit({"workload": str(path)})
    else:
        print(path)
