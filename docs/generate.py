"""Write the generated pages: reference, glossary, evidence. `--check` fails if one is out of date."""

from __future__ import annotations

import sys
import typing
from collections.abc import Container
from pathlib import Path
from typing import Any

import evidence
import glossary
import picture
import typer

import powerband.plan as plan
from powerband import catalog, engines, errors
from powerband.bench.guards import GUARDS
from powerband.cli.commands import GROUPS, RENAMED_COMMANDS, RENAMED_OPTIONS
from powerband.cli.main import app
from powerband.core.document import Document
from powerband.core.engine import FailureKind
from powerband.core.fleet import Fleet, Tenants
from powerband.core.quality import QualityFloor
from powerband.core.recipe import Recipe
from powerband.core.records import COLUMNS
from powerband.core.slo import SLO
from powerband.core.units import about_bytes
from powerband.core.workload import Workload
from powerband.engines import knobs, rules
from powerband.metrics import GAUGES, LATENCIES
from powerband.serve.router.telemetry import Telemetry

FOLDER = Path(__file__).parent / "reference"
BADGES = {
    "python": ("python", "3.11+", "#2563eb"),
    "license": ("license", "Apache-2.0", "#15803d"),
    "status": ("status", "alpha", "#b45309"),
}
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n"


def commands() -> str:
    """Every command with its arguments and options."""
    lines = [NOTE, "# Commands", "", "Exit codes: see [Errors and exit codes](errors.md).", ""]
    root: Any = typer.main.get_command(app)

    def describe(command: Any, path: str) -> None:
        if hasattr(command, "commands"):
            for name, below in sorted(command.commands.items()):
                describe(below, f"{path} {name}")
            return
        lines.extend([f"### {path}", "", (command.help or "").strip(), ""])
        if command.epilog:
            lines.extend(["```", *command.epilog.splitlines(), "```", ""])
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                lines.append(f"- `{(parameter.metavar or parameter.name.upper()).strip('[]')}`: {parameter.help}")
            else:
                metavar = f" {parameter.metavar}" if parameter.metavar else ""
                lines.append(f"- `{', '.join(parameter.opts)}{metavar}`: {parameter.help}")
        lines.append("")

    for title, names in GROUPS.items():
        lines.extend([f"## {title}", ""])
        for name in names:
            describe(root.commands[name], f"powerband {name}")
    lines += ["## Names of 0.1", "", "These still work and print a deprecation line.", "", "| old | new |", "|---|---|"]
    lines += [f"| `powerband {old}` | `powerband {new}` |" for old, new in RENAMED_COMMANDS.items()]
    for command, renamed in RENAMED_OPTIONS.items():
        lines += [f"| `powerband {command} {old}` | `{new}` |" for old, new in renamed.items()]
    return "\n".join(lines) + "\n"


def takes(schema: dict[str, Any]) -> str:
    """Return a JSON Schema as short text."""
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(takes(one) for one in choices if one.get("type") != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "$ref" in schema:
        return "`" + schema["$ref"].rpartition("/")[2] + "`"
    if schema.get("type") == "array":
        return f"list of {takes(schema['items'])}"
    if "examples" in schema:
        return f"text like `{schema['examples'][0]}`"
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([str(schema.get("type", schema.get("const"))), *bounds])


BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}


def engine_page(name: str) -> str:
    """One engine: its knobs, the conflicts that are rejected, the failures that are recognised."""
    engine, table = engines.get(name), rules.facts(name)
    schema = engine.config_type.model_json_schema()
    never_run = engine.never_run()
    lines = [
        NOTE,
        f"# {name}",
        "",
        (type(engine).__doc__ or "").strip(),
        "",
        *([f"**{never_run[0].upper()}{never_run[1:]}.**", ""] if never_run else []),
        "## Knobs",
        "",
        "| knob | area | flag | type |",
        "|---|---|---|---|",
    ]
    for field, knob in knobs.knobs(engine.config_type):
        flag = knobs.spelling(field, knob) + (f" / {knob.off}" if knob.off else "")
        lines.append(f"| `{field}` | {knob.lever} | `{flag}` | {takes(schema['properties'][field])} |")
    lines += ["", "Also `extra_args` (a list, appended to the command) and `extra_env` (a mapping)."]
    if table.conflicts:
        lines += ["", "## Rejected before a start", "", "| rule | when | severity |", "|---|---|---|"]
        lines += [f"| {one.rule} | `{one.when.replace('|', '/')}` | {one.severity} |" for one in table.conflicts]
    if table.failures:
        lines += ["", "## Failures recognised in its log", ""]
        lines += [f"- **{one.failure}**: {one.message}" for one in table.failures]
    return "\n".join(lines) + "\n"


def gauges() -> str:
    """The gauge names that are the same for every engine."""
    names = [name for name in engines.names() if rules.facts(name).gauges]
    lines = [
        NOTE,
        "# Gauges",
        "",
        "One set of names for every engine. An empty cell: the engine does not have that counter.",
        "",
    ]
    lines += [f"| gauge | unit | description | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    computed = {
        ("llamacpp", "kv_use"): "from `/slots`",
        ("llamacpp", "prefix_queries_tokens"): "computed + cached prompt tokens",
    }
    for gauge, metric in GAUGES.items():
        cells = []
        for name in names:
            theirs = rules.facts(name).gauges.get(gauge)
            cells.append(computed.get((name, gauge)) or (f"`{theirs}`" if theirs else ""))
        lines.append(f"| `{gauge}` | {metric.unit} | {metric.description} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fields(title: str, kind: type[Document], elsewhere: Container[str] = ()) -> list[str]:
    """The fields of a document, and of its nested values that no other page describes."""
    schema = kind.model_json_schema()
    lines = [f"## {title}", "", "| field | type | description |", "|---|---|---|"]
    for name, one in schema["properties"].items():
        lines.append(f"| `{name}` | {takes(one)} | {one.get('description', '')} |")
    lines.append("")
    for name, one in sorted(schema.get("$defs", {}).items()):
        if name in elsewhere:
            continue
        parts = [f"`{key}` {takes(value)}" for key, value in one.get("properties", {}).items()]
        lines.append(f"- **`{name}`**: {one.get('description', '')} {', '.join(parts)}")
    return [*lines, ""]


def documents() -> str:
    """The documents that users write or read, except workloads and SLOs."""
    lines = [
        NOTE,
        "# Documents",
        "",
        "`powerband check FILE` validates a document; `powerband schema KIND` prints its JSON Schema.",
        "",
    ]
    kinds = {"A quality floor": QualityFloor, "A recipe": Recipe, "A fleet": Fleet, "Tenants": Tenants}
    for title, kind in kinds.items():
        lines += fields(title, kind, {"Workload", "SLO", *Workload.model_json_schema()["$defs"]})
    return "\n".join(lines).rstrip() + "\n"


def errors_page() -> str:
    """The exit codes, the exception tree and the kinds of engine failure."""
    text = (errors.__doc__ or "").strip().splitlines()
    lines = [NOTE, "# Errors and exit codes", "", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in errors.EXIT_CODES.items()]
    lines += ["", "## Exceptions", "", "```", *text[2:-2], "```", "", text[-1], ""]
    lines += ["## Kinds of engine failure", "", "With `--json`, `error.failure` is one of:", ""]
    lines.append(", ".join(f"`{kind}`" for kind in typing.get_args(FailureKind)) + ".")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """The Prometheus metrics of a fleet."""
    lines = [
        NOTE,
        "# Metrics of a fleet",
        "",
        "At `/metrics`, with the same names for every engine.",
        "",
        "| metric | type | labels | description |",
        "|---|---|---|---|",
    ]
    telemetry = Telemetry()
    labels = {one._name: one._labelnames for one in vars(telemetry).values() if hasattr(one, "_labelnames")}
    for family in telemetry.registry.collect():
        ending = "_total" if family.type == "counter" else ""
        named = labels.get(family.name) or getattr(family, "_labelnames", ())
        names = ", ".join(f"`{name}`" for name in named)
        lines.append(f"| `{family.name}{ending}` | {family.type} | {names} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def workloads() -> str:
    """The fields of a workload, and the entries of the catalogue."""
    lines = [
        NOTE,
        "# Workloads and SLOs",
        "",
        "A workload describes traffic; the same file gives the same requests.",
        "",
    ]
    lines += [*fields("A workload", Workload), *fields("An SLO", SLO)]
    for kind_name in ("workload", "slo"):
        lines += [f"## Catalogue: {kind_name}", ""]
        for name in catalog.names(kind_name):
            body = catalog.text(kind_name, name).split("\n", 1)[1].strip()
            lines += [f"`{name}`", "", "```yaml", body, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def measuring() -> str:
    """The metrics and guards of `bench`."""
    lines = [NOTE, "# Metrics and guards of bench", "", "| latency | unit | description |", "|---|---|---|"]
    lines += [f"| {one.name.upper()} | {one.unit} | {one.description} |" for one in LATENCIES.values()]
    lines += ["", "## Guards", "", "| guard | rejects |", "|---|---|"]
    lines += [f"| {name} | {' '.join((guard.__doc__ or '').split())} |" for name, guard in GUARDS.items()]
    lines += ["", "## Columns of the request records (`level-NN.npz`)", ""]
    lines += [
        "Open them with `numpy.load`. Times are nanoseconds from the start of the clock; `gaps` are microseconds.",
        "",
    ]
    lines += [", ".join(f"`{name}`" for name in (*COLUMNS, "gaps"))]
    return "\n".join(lines) + "\n"


def devices() -> str:
    """Every device of the catalogue, with its price and the source of the price."""
    lines = [
        NOTE,
        "# Devices",
        "",
        "| name | aliases | description | memory | bandwidth per s | $ per hour | source of the price |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in catalog.names("device"):
        one = plan.device(name)
        price = f"{one.price.usd_per_h:g} | {one.price.source}, {one.price.as_of}"
        memory, bandwidth = about_bytes(one.memory), about_bytes(one.bandwidth)
        lines.append(f"| `{name}` | {', '.join(one.aliases)} | {one.description} | {memory} | {bandwidth} | {price} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages and pictures, or compare them."""
    pages = {"commands.md": commands(), "gauges.md": gauges(), "workloads.md": workloads(), "bench.md": measuring()}
    pages |= {"documents.md": documents(), "errors.md": errors_page(), "metrics.md": metrics_page()}
    pages |= {"devices.md": devices(), "../pictures/variants.svg": picture.variants_chart()}
    pages |= {"../pictures/loop.svg": picture.loop(), "../pictures/processes.svg": picture.processes()}
    pages |= {f"../pictures/{name}.svg": picture.badge(*words) for name, words in BADGES.items()}
    pages |= {f"engine-{name}.md": engine_page(name) for name in engines.names()}
    pages |= {"../glossary.md": NOTE + glossary.page(), "../evidence.md": NOTE + evidence.page()}
    readme = (FOLDER.parent.parent / "README.md").read_text()
    pages["../../README.md"] = evidence.with_table(readme)
    FOLDER.mkdir(exist_ok=True)
    stale = [
        name for name, text in pages.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run 'python docs/generate.py'" if stale else 0)
    for name, text in pages.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
