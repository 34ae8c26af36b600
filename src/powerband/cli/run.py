"""`powerband run`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr, warning
from powerband.cli.progress import start_progress

if TYPE_CHECKING:
    from powerband.launchers.local import Prepared
    from powerband.runtime.replica import Replica


def run(
    what: Annotated[
        str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="A deployment.yaml, or a model: path or hub id.")
    ],
    *,
    engine: options.Engine = None,
    set_: options.Set = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on.", show_default="a free port")
    ] = None,
    engine_path: options.EnginePath = None,
    ready_timeout: options.ReadyTimeout = None,
    stop_grace: Annotated[
        str, typer.Option(metavar="DURATION", help="Maximum time for a stop before the engine is killed.")
    ] = "3s",
    run_dir: options.RunDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the engine's command and exit.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start even if a check rejects the deployment.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Start one deployment in the foreground; Ctrl-C stops it.

    It is reported as ready after it has answered a real request.
    """
    import asyncio

    from powerband import inputs
    from powerband.launchers import local

    deployment = inputs.deployment(what, engine=engine, settings=set_ or [], host=host, port=port)
    ready_timeout_s = inputs.seconds(ready_timeout) if ready_timeout else None
    stop_grace_s = inputs.seconds(stop_grace)
    report = stderr(json=json).print
    prepared = local.prepare(deployment, engine_path=engine_path, force=force, download=not dry_run, report=report)
    if prepared.engine.reads_weights and prepared.model.format is None:
        sentence = f"{deployment.variant.full_source} is not downloaded, so the command names the hub id"
        stderr(json=json).print(warning(sentence, "run it without --dry-run to download the model"))
    if dry_run:
        with local.reserve(prepared) as lease:
            command = prepared.command(port or 8000, lease.allocation)
        line = local.shell_line(command) if command else ""
        if json:
            emit({"command": line, "problems": [problem.model_dump() for problem in prepared.problems]})
        else:
            print(line)
        return
    for problem in prepared.problems:
        stderr().print(warning(problem.sentence, problem.hint))
    directory = inputs.folder(run_dir) if run_dir else None
    asyncio.run(
        _serve(
            prepared,
            directory=directory,
            ready_timeout_s=ready_timeout_s,
            stop_grace_s=stop_grace_s,
            json=json,
        )
    )


async def _serve(
    prepared: Prepared, *, directory: Any, ready_timeout_s: float | None, stop_grace_s: float, json: bool
) -> None:
    """Serve until the engine exits or a signal arrives; a second signal kills everything at once."""
    import asyncio
    import os
    import signal

    from powerband.launchers import local

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    stop_requested_s: float | None = None

    def on_signal() -> None:
        nonlocal stop_requested_s
        if stop_requested_s is None:
            stop_requested_s = time.monotonic()
            task.cancel()
        elif time.monotonic() - stop_requested_s > 0.5:  # within 0.5 s it is the same Ctrl-C, delivered twice
            os._exit(130)  # the keeper kills the engine

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    replica: Replica | None = None
    try:
        with start_progress(json) as on_change:
            launching = local.launch(
                prepared,
                directory=directory,
                ready_timeout_s=ready_timeout_s,
                stop_grace_s=stop_grace_s,
                on_change=on_change,
            )
            async with launching as replica:
                _announce(replica, prepared, json=json)
                await replica.watch()
    except asyncio.CancelledError:
        if json:
            emit({"event": "stopped", "log": str(replica.log_path) if replica else None})
        else:
            stderr().print("stopped" + (f"; log: {replica.log_path}" if replica else ""))


def _announce(replica: Replica, prepared: Prepared, *, json: bool) -> None:
    from powerband.core.units import about_bytes
    from powerband.launchers import local

    memory = replica.process.memory_bytes() if replica.process else None
    total = sum(timing.seconds for timing in replica.timings)
    line = local.shell_line(replica.command) if replica.command else None
    if json:
        emit(
            {
                "event": "ready",
                "url": replica.url,
                "model": prepared.deployment.served_name,
                "pid": replica.process.pid if replica.process else None,
                "memory_bytes": memory,
                "startup_s": round(total, 3),
                "phases": {timing.phase: round(timing.seconds, 3) for timing in replica.timings},
                "readings": replica.readings(),
                "command": line,
                "directory": str(replica.directory),
                "engine": prepared.installation.model_dump(mode="json", include={"engine", "version", "build"}),
            }
        )
        return
    from rich.table import Table

    console, table = out(), Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    phases = ", ".join(f"{timing.phase} {timing.seconds:.1f}" for timing in replica.timings if timing.seconds >= 0.05)
    table.add_row("[bold green]ready[/]", f"[bold]{replica.url}/v1[/]  model {prepared.deployment.served_name}")
    if memory is not None:
        table.add_row("[bold]memory[/]", about_bytes(memory))
    table.add_row("[bold]start-up[/]", f"{total:.1f} s: {phases}")
    table.add_row("[bold]log[/]", str(replica.log_path))
    console.print(table)
    if line:
        console.print("[bold]command[/]")
        print(line, flush=True)
    stderr().print("[dim]press Ctrl-C to stop[/]")
