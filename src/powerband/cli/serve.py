"""`powerband serve` and `powerband key`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import inputs, top
from powerband.cli.output import Json, emit, out, stderr

if TYPE_CHECKING:
    from powerband.serve import Fleet


def serve(
    what: Annotated[str, typer.Argument(metavar="RECIPE|DEPLOYMENT|FLEET", help="What to serve.")],
    *,
    replicas: Annotated[int | None, typer.Option(min=1, help="How many; a fleet's file says so itself.")] = None,
    tenants: Annotated[
        str | None, typer.Option(help="A tenants.yaml: who may ask. Read again when it changes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="a free one")] = None,
    launcher: Annotated[str, typer.Option(help="Where replicas run: local, or ray.")] = "local",
    cluster: Annotated[str, typer.Option(help="The address of the Ray cluster.")] = "auto",
    capture: Annotated[
        bool, typer.Option("--capture", help="Note lengths, times and shared beginnings of requests, never their text.")
    ] = False,
    capture_text: Annotated[
        bool,
        typer.Option("--capture-text", help="Note what they say too; addresses, numbers and keys are blotted out."),
    ] = False,
    ready_timeout: Annotated[str, typer.Option(help="How long the start may take.")] = "600s",
    run_dir: Annotated[str | None, typer.Option(help="Where logs go.", show_default="a new state folder")] = None,
    json: Json = False,
) -> None:
    """Serve a recipe as a fleet behind one OpenAI-compatible address. Ctrl-C lets every answer end, then stops it."""
    import asyncio
    from pathlib import Path

    from powerband import serve as stage
    from powerband.core.fleet import Tenants
    from powerband.store import documents

    parts, listed = stage.resolve(Path(what), replicas=replicas)
    if tenants:
        documents.of(Tenants, Path(tenants))
        listed = str(Path(tenants).resolve())
    folder = inputs.folder(run_dir) if run_dir else None
    fleet = stage.fleet(
        parts,
        tenants=listed,
        host=host,
        port=port,
        folder=folder,
        cluster=inputs.cluster(launcher, cluster),
        capture=capture,
        capture_text=capture_text,
    )
    asyncio.run(_serve(fleet, ready_timeout_s=inputs.seconds(ready_timeout), json=json))


async def _serve(starting: Any, *, ready_timeout_s: float, json: bool) -> None:
    """Serve until somebody stops us; a second signal ends everything at once."""
    import asyncio
    import os
    import signal

    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            os._exit(130)  # the keepers kill what is left
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    began = time.monotonic()
    async with starting as fleet:
        ready = asyncio.create_task(fleet.ready(ready_timeout_s))
        stop = asyncio.create_task(asked.wait())
        await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            _announce(fleet, time.monotonic() - began, json=json)
            await _watch(fleet, asked, json=json)
        ready.cancel()
        if not json:
            stderr().print("waiting for the answers that are being written; Ctrl-C again cuts them off")
    if json:
        emit({"event": "stopped"})


def _announce(fleet: Fleet, seconds: float, *, json: bool) -> None:
    if json:
        emit({"event": "ready", "url": fleet.url, "folder": str(fleet.folder), "startup_s": round(seconds, 3)})
        return
    out().print(f"[bold green]ready[/]  [bold]{fleet.url}/v1[/]  after {seconds:.1f} s; logs in {fleet.folder}")


async def _watch(fleet: Fleet, asked: Any, *, json: bool) -> None:
    """Show the fleet on a terminal until somebody stops it."""
    import asyncio
    import contextlib

    console = stderr()
    if json or not console.is_terminal:
        await asked.wait()
        return
    from rich.live import Live

    with Live(top.table(fleet.status()), console=console, refresh_per_second=2, transient=True) as live:
        while not asked.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), 0.5)
            live.update(top.table(fleet.status()))


def key(
    tenant: Annotated[str, typer.Argument(help="Who it is for.")],
    *,
    json: Json = False,
) -> None:
    """Make an API key: the key for the tenant, and the line for tenants.yaml, which holds only its hash."""
    from powerband.serve.router import admission

    secret, digest = admission.new_key()
    if json:
        emit({"tenant": tenant, "key": secret, "key_sha256": digest})
        return
    print(secret)
    stderr().print(f"in tenants.yaml:  {tenant}: {{key_sha256: {digest}}}", soft_wrap=True)
