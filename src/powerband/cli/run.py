"""`powerband run`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr, warning

if TYPE_CHECKING:
    from powerband.launchers.local import Prepared
    from powerband.runtime.replica import Replica


def run(
    what: Annotated[
        str, typer.Argument(metavar="DEPLOYMENT|MODEL", help="A deployment.yaml, or a model: path or hub id.")
    ],
    *,
    engine: Annotated[str | None, typer.Option(help="vllm, llamacpp, openai or fake; guessed from the model.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="An engine knob; may stand again.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="a free one")] = None,
    engine_path: Annotated[str | None, typer.Option(help="Use this binary or interpreter as the engine.")] = None,
    ready_timeout: Annotated[str, typer.Option(help="How long a start may take.")] = "600s",
    stop_grace: Annotated[str, typer.Option(help="How long a stop may take before the engine is killed.")] = "3s",
    run_dir: Annotated[str | None, typer.Option(help="Where logs go.", show_default="a new state folder")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start although a check refuses.")] = False,
    json: Json = False,
) -> None:
    """Start one deployment in the foreground. It is ready when it has answered a real request; Ctrl-C stops it."""
    import asyncio

    from powerband.launchers import local

    deployment = inputs.deployment(what, engine=engine, settings=set_ or [], host=host, port=port)
    ready_timeout_s, stop_grace_s = inputs.seconds(ready_timeout), inputs.seconds(stop_grace)
    prepared = local.prepare(deployment, engine_path=engine_path, force=force)
    if dry_run:
        command = prepared.command(port or 8000)
        line = local.paste(command) if command else ""
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
    prepared: Prepared, *, directory: Any, ready_timeout_s: float, stop_grace_s: float, json: bool
) -> None:
    """Serve until the engine dies or somebody stops us; a second signal ends everything at once."""
    import asyncio
    import os
    import signal

    from powerband.launchers import local

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    asked: float | None = None

    def on_signal() -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            task.cancel()
        elif time.monotonic() - asked > 0.5:  # sooner it is the same wish, sent twice
            os._exit(130)  # the keeper kills the engine

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    replica: Replica | None = None
    try:
        with inputs.start_progress(json) as on_change:
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
            stderr().print("stopped" + (f"; its log: {replica.log_path}" if replica else ""))


def _announce(replica: Replica, prepared: Prepared, *, json: bool) -> None:
    from powerband.core.units import about_bytes
    from powerband.launchers import local

    memory = replica.process.memory_bytes() if replica.process else None
    total = sum(timing.seconds for timing in replica.timings)
    line = local.paste(replica.command) if replica.command else None
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
    stderr().print("[dim]Ctrl-C stops it[/]")
