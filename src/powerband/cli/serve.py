"""`powerband serve` and `powerband key`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli import options, top
from powerband.cli.output import emit, live, out, stderr

if TYPE_CHECKING:
    from powerband.serve import Fleet


def serve(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|DEPLOYMENT|FLEET", help="A recipe.yaml, deployment.yaml or fleet.yaml.")
    ],
    *,
    replicas: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of replicas; a fleet.yaml has its own.")
    ] = None,
    tenants: Annotated[
        str | None, typer.Option(metavar="FILE", help="A tenants.yaml with API keys and limits; reloaded on change.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port to listen on.", show_default="a free port")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate chain in PEM: serve HTTPS. Reloaded when replaced.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Private key of --tls-cert, in PEM.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Envoy's worker threads.", show_default="one per core")
    ] = None,
    launcher: options.Launcher = "local",
    cluster: options.Cluster = "auto",
    capture: Annotated[
        bool,
        typer.Option("--capture", help="Record lengths, times and prefix hashes of requests, never their text."),
    ] = False,
    capture_text: Annotated[
        bool, typer.Option("--capture-text", help="Also record a sample of prompts, redacted.")
    ] = False,
    ready_timeout: options.ReadyTimeout = None,
    run_dir: options.RunDir = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve a recipe as a fleet behind one OpenAI-compatible address.

    Crashed replicas restart automatically. Ctrl-C finishes the answers in progress, then stops.
    """
    import asyncio
    from pathlib import Path

    from powerband import inputs
    from powerband import serve as stage
    from powerband.core.fleet import Tenants
    from powerband.store import documents

    console = stderr(json=json)
    if bool(tls_cert) != bool(tls_key):
        raise typer.BadParameter("give both --tls-cert and --tls-key")
    models, tenants_file = stage.resolve(Path(what), replicas=replicas, report=console.print)
    if tenants:
        documents.read_as(Tenants, Path(tenants))
        tenants_file = str(Path(tenants).resolve())
    folder = inputs.folder(run_dir) if run_dir else None
    fleet = stage.fleet(
        models,
        tenants=tenants_file,
        host=host,
        port=port,
        folder=folder,
        tls=stage.check_certificate(tls_cert, tls_key) if tls_cert and tls_key else None,
        threads=threads,
        cluster=cluster if launcher == "ray" else "",
        capture=capture,
        capture_text=capture_text,
    )
    asyncio.run(_serve(fleet, ready_timeout_s=inputs.seconds(ready_timeout) if ready_timeout else None, json=json))


async def _serve(starting: Any, *, ready_timeout_s: float | None, json: bool) -> None:
    """Serve until a signal arrives; a second signal kills everything at once."""
    import asyncio
    import os
    import signal

    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(130)  # the keepers kill the remaining processes
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    began = time.monotonic()
    async with starting as fleet:
        ready = asyncio.create_task(fleet.wait_until_ready(ready_timeout_s))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait([ready, stop], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            _announce(fleet, time.monotonic() - began, json=json)
            await _watch(fleet, stopping, json=json)
        ready.cancel()
        stderr(json=json).print("finishing the answers in progress; Ctrl-C again stops at once")
    if json:
        emit({"event": "stopped"})


def _announce(fleet: Fleet, seconds: float, *, json: bool) -> None:
    if json:
        emit({"event": "ready", "url": fleet.url, "folder": str(fleet.folder), "startup_s": round(seconds, 3)})
        return
    out().print(f"[bold green]ready[/]  [bold]{fleet.url}/v1[/]  after {seconds:.1f} s; logs in {fleet.folder}")


async def _watch(fleet: Fleet, stopping: Any, *, json: bool) -> None:
    """Show the fleet on a terminal until it is stopped."""
    import asyncio
    import contextlib

    if json or not live():
        await stopping.wait()
        return
    from rich.live import Live

    with Live(top.table(fleet.status()), console=stderr(), refresh_per_second=2, transient=True) as view:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), 0.5)
            view.update(top.table(fleet.status()))


def key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")],
    *,
    json: options.Json = False,
) -> None:
    """Create an API key and its line for tenants.yaml.

    tenants.yaml stores only the SHA-256 of the key.
    """
    from powerband.serve.router import admission

    secret, digest = admission.new_key()
    if json:
        emit({"tenant": tenant, "key": secret, "key_sha256": digest})
        return
    print(secret)
    stderr().print(f"add to tenants.yaml:  {tenant}: {{key_sha256: {digest}}}", soft_wrap=True)
