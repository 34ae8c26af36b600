"""`powerband diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.diagnosis import Diagnosis
    from powerband.diagnose import DiagnoseSpec


def diagnose(
    url: Annotated[str, typer.Argument(metavar="URL|FLEET_DIR", help="Address of the server, or a fleet's directory.")],
    *,
    window: Annotated[str, typer.Option("--for", metavar="DURATION", help="How long to read.")] = "60s",
    pid: Annotated[
        int | None,
        typer.Option(metavar="PID", help="The server's process.", show_default="the one that listens on the port"),
    ] = None,
    command: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The server's command line, if it runs elsewhere.")
    ] = None,
    log: Annotated[str | None, typer.Option(metavar="FILE", help="The server's log.")] = None,
    on: Annotated[
        str | None, typer.Option(metavar="DEVICE[:COUNT]", help="The server's devices, if it runs elsewhere.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The served model, if its name does not tell it.")
    ] = None,
    slo: options.Slo = "interactive",
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep reading; print a finding when it appears and when it is gone.")
    ] = False,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Write diagnosis.html and diagnosis.json.")] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say what limits a running server, and what to change.

    Sends only GET requests, reads no prompts, and changes nothing.
    Exit code 4: a problem was found.
    """
    from pathlib import Path

    from powerband import inputs
    from powerband.diagnose import DiagnoseSpec
    from powerband.diagnose.collect import Target
    from powerband.diagnose.fleet import targets
    from powerband.errors import RequirementNotMet

    given = Target(url, pid=pid, command=command, log=Path(log) if log else None, model=model)
    specs = [
        DiagnoseSpec(target, window_s=inputs.seconds(window), slo=inputs.slo(slo), device=on)
        for target in targets(given)
    ]
    if watch:
        _watch(specs, json=json)
        return
    problems = 0
    for number, spec in enumerate(specs):
        found = _once(spec, json=json)
        problems += found.count("problem")
        _show(found, json=json)
        if output:
            folder = inputs.folder(Path(output) / str(number) if len(specs) > 1 else output)
            _write(found, folder)
            stderr(json=json).print(f"report: {folder / 'diagnosis.html'}", markup=False)
    if problems:
        raise typer.Exit(RequirementNotMet.exit_code)


def _once(spec: DiagnoseSpec, *, json: bool) -> Diagnosis:
    """Diagnose one server; the preliminary answer goes to stderr."""
    import asyncio

    from powerband import diagnose as stage
    from powerband.reports import diagnosis as report

    console = stderr(json=json)

    def on_first(found: Diagnosis) -> None:
        for part in report.console(found):
            console.print(part, soft_wrap=False)
        console.print(f"[dim]reading for {spec.window_s:.0f} s[/]")

    return asyncio.run(stage.diagnose(spec, on_first=on_first))


def _show(found: Diagnosis, *, json: bool) -> None:
    from powerband.reports import diagnosis as report

    if json:
        emit(found.to_data())
        return
    console = out()
    for part in report.console(found):
        console.print(part)


def _write(found: Diagnosis, folder: Path) -> None:
    from powerband.reports import diagnosis as report

    (folder / "diagnosis.html").write_text(report.html(found))
    (folder / "diagnosis.json").write_text(found.to_json())


def _watch(specs: list[DiagnoseSpec], *, json: bool) -> None:
    """Diagnose again and again; report the findings above 'note' that appear and disappear."""
    import asyncio
    import time

    from rich.markup import escape

    from powerband import diagnose as stage

    console, known = out(), set[tuple[str, str]]()
    while True:
        for spec in specs:
            found = asyncio.run(stage.diagnose(spec))
            now = {(found.url, one.rule): one for one in found.findings if one.severity != "note"}
            for key in sorted(set(now) - known):
                if json:
                    emit({"at": found.taken_at, "url": found.url, "appeared": now[key].model_dump(mode="json")})
                else:
                    one = now[key]
                    text = f"{found.url}  {one.severity}: {one.title}; {one.evidence}; change: {one.change.short}"
                    console.print(f"{time.strftime('%T')}  {escape(text)}")
            for url, rule in sorted(key for key in known if key[0] == found.url and key not in now):
                if json:
                    emit({"at": found.taken_at, "url": url, "gone": rule})
                else:
                    console.print(f"{time.strftime('%T')}  {escape(url)}  gone: {rule}")
            known = {key for key in known if key[0] != found.url} | set(now)
