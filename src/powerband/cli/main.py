"""The program `powerband`: its verbs, and how an error leaves it."""

from __future__ import annotations

import errno
import json
import sys
from typing import Annotated

import typer

from powerband import __version__
from powerband.cli import (
    adopt,
    bench,
    check,
    diff,
    doctor,
    engine,
    evaluate,
    export,
    observe,
    plan,
    quantize,
    rollout,
    run,
    schema,
    serve,
    show,
    top,
    tune,
    verify,
)
from powerband.errors import InvalidMeasurement, PowerbandError

app = typer.Typer(
    name="powerband",
    help="The cheapest way to serve an open-weight LLM that keeps your latency promise and your quality floor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxed help costs 150 ms of imports at every --help
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("show")(show.show)
app.command("schema")(schema.schema)
app.add_typer(engine.app, name="engine")
app.command("run")(run.run)
app.command("plan")(plan.plan)
app.command("quantize")(quantize.quantize)
app.command("evaluate")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("verify")(verify.verify)
app.command("serve")(serve.serve)
app.command("rollout")(rollout.rollout)
app.command("key")(serve.key)
app.command("top")(top.top)
app.command("observe")(observe.observe)
app.command("capture")(observe.capture)
app.command("export")(export.export)
app.command("diff")(diff.diff)
app.command("adopt")(adopt.adopt)


def _version(value: bool) -> None:
    if value:
        print(f"powerband {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; every error that we foresee leaves as a sentence, a hint and an exit code."""
    try:
        app()
    except PowerbandError as error:
        _report(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        hint = "raise the limit (`ulimit -n`), or lower the load: each request in flight is a file"
        _report(full := InvalidMeasurement("this system lets no more files be open at once", hint=hint))
        sys.exit(full.exit_code)


def _report(error: PowerbandError) -> None:
    evidence = getattr(error, "evidence", "")
    if "--json" in sys.argv:
        details = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        details |= {"failure": error.failure, "evidence": evidence} if hasattr(error, "failure") else {}
        print(json.dumps({"error": details | {"exit_code": error.exit_code}}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), error.message))
    if evidence:
        console.print(Text.assemble(("  engine: ", "dim"), (evidence, "dim")))
    console.print(Text.assemble(("hint: ", "bold cyan"), error.hint))
