"""`powerband engine install | list | remove`, and the display of installation steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli.commands import Command
from powerband.cli.options import Json, Quiet, Verbose, choice
from powerband.cli.output import emit, live, out, stderr

if TYPE_CHECKING:
    from powerband.core.engine import Installation, StepProgress

app = typer.Typer(help="Install, list and remove inference engines.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[
    str,
    typer.Argument(
        **choice("installable engine", ("vllm", "llamacpp")) | {"metavar": "ENGINE"}, help="vllm or llamacpp."
    ),
]
Version = Annotated[
    str | None,
    typer.Option(
        "--version", metavar="VERSION", help="Version of the engine; by default the one that Powerband is tested with."
    ),
]
_LINE_INTERVAL_S = 30.0


@app.command(
    "install", cls=Command, epilog="powerband engine install llamacpp\npowerband engine install vllm --version 0.32.0"
)
def install(
    name: Name,
    *,
    version: Version = None,
    pip_arg: Annotated[
        list[str] | None, typer.Option("--pip-arg", metavar="ARG", help="Argument for pip; repeatable.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Install an engine into a separate environment, built for this machine."""
    import asyncio

    from powerband import engines
    from powerband.runtime import devices, installations

    began, host = time.monotonic(), devices.this_host()
    with show_steps(json=json) as progress:
        installation, installed_now = asyncio.run(
            installations.install(
                engines.get(name), host=host, version=version, pip_args=tuple(pip_arg or ()), progress=progress
            )
        )
    if json:
        emit({**_data(installation), "installed_now": installed_now, "seconds": round(time.monotonic() - began, 1)})
        return
    verb = f"installed in {time.monotonic() - began:.0f} s" if installed_now else "was already installed"
    out().print(f"[green]ok[/] {name} {installation.version} {verb}: {installation.home}")


@app.command("list", cls=Command, epilog="powerband engine list")
def list_(*, json: Json = False) -> None:
    """List the engines on this machine: installed by Powerband, and on PATH."""
    from powerband import engines
    from powerband.runtime import installations

    found = [one for name in engines.names() for one in installations.discover(name)]
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


@app.command("remove", cls=Command, epilog="powerband engine remove vllm")
def remove(name: Name, *, version: Version = None, json: Json = False) -> None:
    """Remove an engine that Powerband installed."""
    from powerband.runtime import installations

    removed = installations.remove(name, version=version)
    if json:
        emit([_data(one) for one in removed])
        return
    for one in removed:
        out().print(f"[green]ok[/] removed {one.engine} {one.version}: {one.home}")


@contextlib.contextmanager
def show_steps(label: str = "", *, json: bool = False) -> Iterator[Callable[[StepProgress], None]]:
    """Show steps on stderr: one live line on a terminal; elsewhere a line when a step starts and every 30 s."""
    from rich.text import Text

    if json or not live():
        yield step_printer(label, json=json)
        return
    with stderr().status(label) as status:
        yield lambda step: status.update(Text(label + step_line(step)))


def step_printer(label: str, *, json: bool = False) -> Callable[[StepProgress], None]:
    """Return a callback that prints a line when a step starts, and at most one every 30 s while it runs."""
    console, printed_s = stderr(json=json), 0.0

    def show(step: StepProgress) -> None:
        nonlocal printed_s
        if step.starts or time.monotonic() - printed_s >= _LINE_INTERVAL_S:
            printed_s = time.monotonic()
            console.print(label + step_line(step), markup=False)

    return show


def step_line(step: StepProgress) -> str:
    """Return a line such as '6/11  compile llama.cpp  37%  4 min gone, about 7 min left'."""
    line = f"{step.number}/{step.total}  {step.title}"
    if step.fraction is not None:
        line += f"  {step.fraction:.0%}"
    if step.elapsed_s >= 1:
        line += f"  {_rounded(step.elapsed_s)} gone"
        if step.remaining_s is not None:
            line += f", about {_rounded(step.remaining_s)} left"
    return line


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else f"{seconds / 60:.0f} min"


def _data(installation: Installation) -> dict[str, object]:
    return installation.model_dump(mode="json", exclude={"flags"})
