"""`powerband engine install | list | remove`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli.output import Json, emit, out, stderr

if TYPE_CHECKING:
    from powerband.core.engine import Installation

app = typer.Typer(help="Install, list and remove inference engines.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(help="vllm or llamacpp")]
Version = Annotated[str | None, typer.Option("--version", help="The engine's version; the default is the one tested.")]


@app.command("install")
def install(
    name: Name,
    *,
    version: Version = None,
    pip_arg: Annotated[list[str] | None, typer.Option("--pip-arg", help="Passed on to pip; may stand again.")] = None,
    json: Json = False,
) -> None:
    """Install an engine into an environment of its own, made for this machine."""
    import asyncio
    import time

    from powerband import engines
    from powerband.runtime import devices, installations

    began, console = time.monotonic(), stderr()

    def progress(title: str, number: int, total: int) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {number + 1}/{total}  {title}")

    work = installations.install(
        engines.get(name), host=devices.this_host(), version=version, pip_args=tuple(pip_arg or ()), progress=progress
    )
    installation, worked = asyncio.run(work)
    if json:
        emit({**_data(installation), "installed_now": worked, "seconds": round(time.monotonic() - began, 1)})
        return
    verb = f"installed in {time.monotonic() - began:.0f} s" if worked else "was installed already"
    out().print(f"[green]ok[/] {name} {installation.version} {verb}: {installation.home}")


@app.command("list")
def list_(*, json: Json = False) -> None:
    """List the engines on this machine: ours, and those on PATH."""
    from powerband import engines
    from powerband.runtime import installations

    found = [one for name in engines.names() for one in installations.found_here(name)]
    if json:
        emit([_data(one) for one in found])
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("engine", "version", "origin", "where"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one.engine, one.version, one.origin, one.home or " ".join(one.program))
    out().print(table)


@app.command("remove")
def remove(name: Name, *, version: Version = None, json: Json = False) -> None:
    """Remove an engine that Powerband installed."""
    from powerband.runtime import installations

    removed = installations.remove(name, version=version)
    if json:
        emit([_data(one) for one in removed])
        return
    for one in removed:
        out().print(f"[green]ok[/] removed {one.engine} {one.version}: {one.home}")


def _data(installation: Installation) -> dict[str, object]:
    return installation.model_dump(mode="json", exclude={"flags"})
