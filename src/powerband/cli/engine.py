"""`powerband engine install | list | remove`, and the display of installation steps."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powerband.cli.commands import Command
from powerband.cli.options import Json, Quiet, Verbose, choice
from powerband.cli.output import emit, live, out, stderr

if TYPE_CHECKING:
    from powerband.core.engine import Archive, Installation, StepProgress
    from powerband.engines.base import Engine

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
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="FILE|URL", help="Install the programs of this tar archive; needs --sha256."),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="DIGEST", help="SHA-256 of --archive.")] = None,
    compile_here: Annotated[
        bool, typer.Option("--compile", help="Compile here, even if there is a published program.")
    ] = False,
    pip_arg: Annotated[
        list[str] | None, typer.Option("--pip-arg", metavar="ARG", help="Argument for pip; repeatable.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Install an engine: a published program, or one built for this machine."""
    import asyncio

    from powerband import engines
    from powerband.runtime import devices, installations

    began, host, engine = time.monotonic(), devices.this_host(), engines.get(name)
    given = _archive(engine, archive, sha256, version)
    with show_steps(json=json) as progress:
        installation, installed_now = asyncio.run(
            installations.install_engine(
                engine,
                host=host,
                version=version,
                archive=given,
                compile_here=compile_here,
                pip_args=tuple(pip_arg or ()),
                progress=progress,
            )
        )
    if json:
        emit({**_data(installation), "installed_now": installed_now, "seconds": round(time.monotonic() - began, 1)})
        return
    verb = f"installed in {time.monotonic() - began:.0f} s" if installed_now else "was already installed"
    out().print(f"[green]ok[/] {name} {installation.version} {verb}: {installation.home}")


def _archive(engine: Engine[Any], source: str | None, sha256: str | None, version: str | None) -> Archive | None:
    """Return the archive that the user gives; refuse incomplete options."""
    from powerband.core.engine import Archive
    from powerband.errors import InputError

    if source is None and sha256 is None:
        return None
    example = 'powerband engine install llamacpp --archive FILE --sha256 "$(sha256sum FILE | cut -c-64)"'
    if source is None or sha256 is None or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise InputError("--archive and --sha256 go together; a SHA-256 has 64 hexadecimal digits", hint=example)
    if engine.name != "llamacpp":
        raise InputError(f"--archive: {engine.name} is installed with pip", hint="use --pip-arg, or --version")
    return Archive(version=version or f"archive-{sha256[:8].lower()}", source=source, sha256=sha256)


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

        def show(step: StepProgress) -> None:
            if step.number == 0:
                stderr().print(label + step.title, markup=False)
            else:
                status.update(Text(label + step_line(step)))

        yield show


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
    line = f"{step.number}/{step.total}  {step.title}" if step.number else step.title
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
