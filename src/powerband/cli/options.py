"""Options and arguments that several commands share: one name, one type and one description for one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from powerband.cli import output

ENGINES = ("vllm", "llamacpp", "openai", "fake", "sglang")
PLANNED_ENGINES = ("vllm", "llamacpp", "sglang")  # SGLang only if it is named: nobody has run it
LAUNCHERS = ("local", "ray")


def choice(what: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of an option whose value is one of a few words: its metavar, check and completion."""

    def parse(value: str) -> str:
        from powerband.errors import InputError, did_you_mean

        if value not in known:
            raise InputError(
                f"there is no {what} '{value}'.{did_you_mean(value, known)}", hint=f"use one of: {', '.join(known)}"
            )
        return value

    return {"metavar": f"[{'|'.join(known)}]", "parser": parse, "autocompletion": _starting_with(lambda: known)}


def print_never_run(names: Sequence[str | None], *, json: bool) -> None:
    """Print which of the engines that were asked for nobody has run."""
    from powerband import engines

    for name in filter(None, names):
        if sentence := engines.get(name).never_run():
            output.stderr(json=json).print(f"[yellow]{sentence}[/]")


def catalogue(kind: str, metavar: str, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments of an option that takes a name of the catalogue, with completion."""

    def names() -> Sequence[str]:
        from powerband import catalog

        return (*catalog.names(kind), *extra)

    return {"metavar": metavar, "autocompletion": _starting_with(names)}


def _starting_with(names: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _quiet(value: bool) -> bool:
    if value:
        output.set_verbosity(-1)
    return value


def _verbose(value: bool) -> bool:
    if value:
        output.set_verbosity(1)
    return value


Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_quiet, help="Print no progress, only the result.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_verbose, help="Print every step on a line of its own.")
]

Workload = Annotated[
    str,
    typer.Option(**catalogue("workload", "NAME|FILE"), help="Traffic: see 'powerband list workloads', or a YAML file."),
]
Slo = Annotated[
    str,
    typer.Option("--slo", **catalogue("slo", "NAME|FILE"), help="Latency SLO: see 'powerband list slos', or a file."),
]
OptionalSlo = Annotated[
    str | None,
    typer.Option("--slo", **catalogue("slo", "NAME|FILE"), help="Latency SLO: see 'powerband list slos', or a file."),
]
Floor = Annotated[
    str,
    typer.Option(
        "--quality",
        **catalogue("quality", "NAME|FILE"),
        help="Quality floor: strict, balanced, lenient or a file.",
    ),
]
Quality = Annotated[
    str,
    typer.Option(
        **catalogue("quality", "NAME|FILE", ("none",)),
        help="Quality floor: strict, balanced, lenient, a file, or 'none'.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", **choice("engine", ENGINES), help="Engine; derived from the model by default."),
]
OnlyEngine = Annotated[
    str | None, typer.Option("--engine", **choice("engine", ("vllm", "llamacpp")), help="Consider only this engine.")
]
PlannedEngine = Annotated[
    str | None, typer.Option("--engine", **choice("engine", PLANNED_ENGINES), help="Consider only this engine.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", **choice("engine", (*PLANNED_ENGINES, "fake")), help="Only this engine; repeatable."),
]
Schemes = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        **catalogue("scheme", "SCHEME"),
        help="Only this quantization scheme: see 'powerband list schemes'; repeatable.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KNOB=VALUE", help="Set a knob of the engine, by the engine's own name; repeatable."),
]
EnginePath = Annotated[
    str | None, typer.Option(metavar="PATH", help="Use this binary or Python interpreter as the engine.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME=FILE", help="Data of a task that the quality floor requires; repeatable."),
]
Launcher = Annotated[
    str, typer.Option(**choice("launcher", LAUNCHERS), help="Where engines run: this machine, or a Ray cluster.")
]
Cluster = Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the Ray cluster.")]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="[DEVICE=]USD",
        help="Price of one device per hour; with DEVICE= for that device only; repeatable.",
    ),
]
ReadyTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Maximum time for the engine to become ready.",
        show_default="10 min, and 10 s for each GB of weights",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Directory for logs.", show_default="a new directory below the state directory"),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="PATH", help="Model directory or GGUF file whose tokenizer counts tokens.")
]
FleetDir = Annotated[
    str, typer.Argument(metavar="FLEET_DIR", help="Directory of the fleet; 'powerband serve' prints it.")
]
ModelOfFleet = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Model of the fleet; required if it serves several.")
]
