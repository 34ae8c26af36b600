"""The program `powerband`: its commands, and how an error becomes a message and an exit code."""

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
    diagnose,
    diff,
    doctor,
    engine,
    evaluate,
    export,
    import_,
    list_,
    observe,
    picker,
    plan,
    quantize,
    rollout,
    run,
    scale,
    schema,
    selftest,
    serve,
    show,
    top,
    tune,
    verify,
)
from powerband.cli.commands import Command, Group
from powerband.errors import InvalidMeasurement, PowerbandError

app = typer.Typer(
    name="powerband",
    cls=Group,
    help="Find the cheapest way to serve an open-weight LLM within your latency SLO and quality floor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxed help costs 150 ms of imports at every --help
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: powerband list exit-codes",
)
app.add_typer(engine.app, name="engine")
app.add_typer(scale.app, name="scale")
for _name, _function, _examples in (
    ("doctor", doctor.doctor, "powerband doctor"),
    (
        "selftest",
        selftest.selftest,
        "powerband selftest\npowerband selftest ./Qwen3-0.6B --budget 20min --output gpu-server.json",
    ),
    ("adopt", adopt.adopt, "powerband adopt selftest.json"),
    ("list", list_.list_, "powerband list devices\npowerband list workloads --json"),
    (
        "plan",
        plan.plan,
        "powerband plan meta-llama/Meta-Llama-3.1-70B --on h100:8 --on l40s:8\n"
        "powerband plan ./model.gguf --on this-machine --workload chat --load 2",
    ),
    (
        "run",
        run.run,
        "powerband run ./model.gguf --set ctx_size=4096 --set parallel=4\npowerband run deployment.yaml --port 8000",
    ),
    (
        "bench",
        bench.bench,
        "powerband bench http://127.0.0.1:8000 --workload chat --rate 2\n"
        "powerband bench deployment.yaml --slo interactive --profile climb",
    ),
    (
        "quantize",
        quantize.quantize,
        "powerband quantize ./Llama-3.1-8B-Instruct --scheme q4_k_m --scheme q8_0\n"
        "powerband quantize ./Llama-3.1-8B --scheme w4a16-gptq --calibrate chat",
    ),
    (
        "evaluate",
        evaluate.evaluate,
        "powerband evaluate ./model.Q4_K_M.gguf --reference ./model.F16.gguf\n"
        "powerband evaluate candidate.yaml --reference reference.yaml --quality strict",
    ),
    ("diff", diff.diff, "powerband diff before/measurement.json after/measurement.json"),
    ("import", import_.import_, "powerband import guidellm-report.json --output measurement.json"),
    (
        "tune",
        tune.tune,
        "powerband tune ./Llama-3.1-8B-Instruct --workload chat --slo interactive\n"
        "powerband tune ./model --engine llamacpp --scheme q8_0 --budget 30min\n"
        "powerband tune ./model --output study --resume",
    ),
    (
        "verify",
        verify.verify,
        "powerband verify study/recipe.yaml\npowerband verify study/recipe.yaml --slo tight.yaml",
    ),
    (
        "serve",
        serve.serve,
        "powerband serve study/recipe.yaml --replicas 2 --port 8080\npowerband serve fleet.yaml --tenants tenants.yaml",
    ),
    (
        "picker",
        picker.picker,
        "powerband picker --recipe recipe.yaml --pool llama-8b --lease picker\n"
        "powerband picker --recipe recipe.yaml --dns engines:8000",
    ),
    ("key", serve.key, "powerband key team-a"),
    ("rollout", rollout.rollout, "powerband rollout new/recipe.yaml --fleet FLEET_DIR --canary-weight 0.05"),
    ("export", export.export, "powerband export study/recipe.yaml --to kubernetes --output manifests"),
    (
        "diagnose",
        diagnose.diagnose,
        "powerband diagnose http://127.0.0.1:8000\npowerband diagnose http://gpu-1:8000 --on h100-sxm --log vllm.log",
    ),
    ("top", top.top, "powerband top FLEET_DIR"),
    ("observe", observe.observe, "powerband observe FLEET_DIR\npowerband observe FLEET_DIR --auto --interval 10min"),
    ("capture", observe.capture, "powerband capture FLEET_DIR --output workloads --name march"),
    ("check", check.check, "powerband check deployment.yaml --here"),
    ("show", show.show, "powerband show chat\npowerband show measurement.json"),
    ("schema", schema.schema, "powerband schema deployment > deployment.schema.json"),
):
    app.command(_name, cls=Command, epilog=_examples)(_function)


def _version(value: bool) -> None:
    if value:
        import platform

        from powerband.runtime import installations

        print(f"powerband {__version__}")
        print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
        print(f"engines: {', '.join(installations.summaries()) or 'none; see powerband engine install --help'}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and the engines found."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an expected error ends as a message, a hint and an exit code."""
    try:
        app(prog_name="powerband")
    except PowerbandError as error:
        _report(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        hint = "raise the limit with 'ulimit -n', or lower the load: each request in flight uses a file descriptor"
        _report(full := InvalidMeasurement("too many open files: the system's limit is reached", hint=hint))
        sys.exit(full.exit_code)


_MAX_MESSAGE = 4000  # characters; it can quote a file


def _printable(text: str) -> str:
    """Return a text for a terminal: escape sequences of a quoted file have no effect, and it is not endless."""
    allowed = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text[:_MAX_MESSAGE])
    return "".join(allowed) + (" ..." if len(text) > _MAX_MESSAGE else "")


def _report(error: PowerbandError) -> None:
    evidence = _printable(getattr(error, "evidence", ""))
    if "--json" in sys.argv:
        details = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        details |= {"failure": error.failure, "evidence": evidence} if hasattr(error, "failure") else {}
        print(json.dumps({"error": details | {"exit_code": error.exit_code}}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), _printable(error.message)))
    if evidence:
        console.print(Text.assemble(("  engine: ", "dim"), (evidence, "dim")))
    console.print(Text.assemble(("hint: ", "bold cyan"), _printable(error.hint)))
