"""Write the reference pages from the code; `--check` fails where a page is out of date."""

from __future__ import annotations

import sys
import typing
from collections.abc import Container
from pathlib import Path
from typing import Any

import picture
import typer

from powerband import catalog, engines, errors, plan
from powerband.bench.guards import GUARDS
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
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n"


def commands() -> str:
    """Every command with its arguments and options."""
    lines = [
        NOTE,
        "# Commands",
        "",
        "Exit codes: 0 fine, 1 our bug, 2 your input, 3 the engine or an invalid number, 4 the promise was not met.",
    ]

    def describe(command: Any, path: str) -> None:
        if hasattr(command, "commands"):
            for name, below in sorted(command.commands.items()):
                describe(below, f"{path} {name}")
            return
        lines.extend(["", f"## {path}", "", (command.help or "").strip(), ""])
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                lines.append(f"- `{parameter.metavar or parameter.name.upper()}`: {parameter.help}")
            else:
                lines.append(f"- `{', '.join(parameter.opts)}`: {parameter.help}")

    describe(typer.main.get_command(app), "powerband")
    return "\n".join(lines) + "\n"


def takes(schema: dict[str, Any]) -> str:
    """Return a JSON Schema as a reader of YAML would say it."""
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
    """One engine: its knobs, the conflicts that are refused, the failures that are recognised."""
    engine, table = engines.get(name), rules.facts(name)
    schema = engine.config_type.model_json_schema()
    lines = [
        NOTE,
        f"# {name}",
        "",
        (type(engine).__doc__ or "").strip(),
        "",
        "## Knobs",
        "",
        "| knob | lever | said as | takes |",
        "|---|---|---|---|",
    ]
    for field, knob in knobs.knobs(engine.config_type):
        said = knobs.spelling(field, knob) + (f" / {knob.off}" if knob.off else "")
        lines.append(f"| `{field}` | {knob.lever} | `{said}` | {takes(schema['properties'][field])} |")
    lines += ["", "Beside them: `extra_args` (a list, said last) and `extra_env` (a mapping)."]
    if table.conflicts:
        lines += ["", "## Refused before a start", "", "| rule | when | severity |", "|---|---|---|"]
        lines += [f"| {one.rule} | `{one.when.replace('|', '/')}` | {one.severity} |" for one in table.conflicts]
    if table.failures:
        lines += ["", "## Failures that are recognised in its log", ""]
        lines += [f"- **{one.failure}**: {one.says}" for one in table.failures]
    return "\n".join(lines) + "\n"


def gauges() -> str:
    """Our names for every engine's counters."""
    names = [name for name in engines.names() if rules.facts(name).gauges]
    lines = [
        NOTE,
        "# Gauges",
        "",
        "One set of names for every engine; an empty cell is a counter that the engine does not have.",
        "",
    ]
    lines += [f"| gauge | unit | means | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    computed = {
        ("llamacpp", "kv_use"): "from `/slots`",
        ("llamacpp", "prefix_queries_tokens"): "computed + cached prompt tokens",
    }
    for gauge, metric in GAUGES.items():
        cells = []
        for name in names:
            theirs = rules.facts(name).gauges.get(gauge)
            cells.append(computed.get((name, gauge)) or (f"`{theirs}`" if theirs else ""))
        lines.append(f"| `{gauge}` | {metric.unit} | {metric.means} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fields(title: str, kind: type[Document], elsewhere: Container[str] = ()) -> list[str]:
    """The fields of a document, and of the values in it that are not told elsewhere."""
    schema = kind.model_json_schema()
    lines = [f"## {title}", "", "| field | takes | means |", "|---|---|---|"]
    for name, one in schema["properties"].items():
        lines.append(f"| `{name}` | {takes(one)} | {one.get('description', '')} |")
    lines.append("")
    for name, one in sorted(schema.get("$defs", {}).items()):
        if name in elsewhere:
            continue
        told = [f"`{key}` {takes(value)}" for key, value in one.get("properties", {}).items()]
        lines.append(f"- **`{name}`**: {one.get('description', '')} {', '.join(told)}")
    return [*lines, ""]


def documents() -> str:
    """What a user writes or gets, beside workloads and SLOs."""
    lines = [
        NOTE,
        "# Documents",
        "",
        "`powerband check FILE` says what is wrong with one, `powerband schema KIND` has it for an editor.",
        "",
    ]
    kinds = {"A quality floor": QualityFloor, "A recipe": Recipe, "A fleet": Fleet, "Tenants": Tenants}
    for title, kind in kinds.items():
        lines += fields(title, kind, {"Workload", "SLO", *Workload.model_json_schema()["$defs"]})
    return "\n".join(lines).rstrip() + "\n"


def errors_page() -> str:
    """What can go wrong, and the exit codes."""
    text = (errors.__doc__ or "").strip().splitlines()
    lines = [NOTE, "# Errors and exit codes", "", text[0], "", "```", *text[2:-2], "```", "", text[-1], ""]
    lines += ["## How an engine fails", "", "With `--json` an engine's failure is named:", ""]
    lines.append(", ".join(f"`{kind}`" for kind in typing.get_args(FailureKind)) + ".")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """What a fleet tells Prometheus."""
    lines = [
        NOTE,
        "# Metrics of a fleet",
        "",
        "At `/metrics`, under the same names for every engine.",
        "",
        "| metric | kind | labels | is |",
        "|---|---|---|---|",
    ]
    watch = Telemetry()
    labels = {one._name: one._labelnames for one in vars(watch).values() if hasattr(one, "_labelnames")}
    for family in watch.registry.collect():
        ending = "_total" if family.type == "counter" else ""
        named = labels.get(family.name) or getattr(family, "_labelnames", ())
        told = ", ".join(f"`{name}`" for name in named)
        lines.append(f"| `{family.name}{ending}` | {family.type} | {told} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def workloads() -> str:
    """The fields of a workload, and the entries of the catalogue."""
    lines = [
        NOTE,
        "# Workloads and SLOs",
        "",
        "A workload says what traffic looks like; the same file is the same traffic.",
        "",
    ]
    lines += [*fields("A workload", Workload), *fields("An SLO", SLO)]
    for kind_name in ("workload", "slo"):
        lines += [f"## In the catalogue: {kind_name}", ""]
        for name in catalog.names(kind_name):
            body = catalog.text(kind_name, name).split("\n", 1)[1].strip()
            lines += [f"`{name}`", "", "```yaml", body, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def measuring() -> str:
    """What `bench` measures, and what it refuses."""
    lines = [NOTE, "# What bench measures and refuses", "", "| latency | unit | means |", "|---|---|---|"]
    lines += [f"| {one.name.upper()} | {one.unit} | {one.means} |" for one in LATENCIES.values()]
    lines += ["", "## Guards", "", "| guard | refuses |", "|---|---|"]
    lines += [f"| {name} | {' '.join((guard.__doc__ or '').split())} |" for name, guard in GUARDS.items()]
    lines += ["", "## Columns of the request records (`level-NN.npz`)", ""]
    lines += [
        "Open them with `numpy.load`. Times are nanoseconds from the start of the clock; `gaps` are microseconds.",
        "",
    ]
    lines += [", ".join(f"`{name}`" for name in (*COLUMNS, "gaps"))]
    return "\n".join(lines) + "\n"


def devices() -> str:
    """Every device of the catalogue, with its price and where that is from."""
    lines = [
        NOTE,
        "# Devices",
        "",
        "| name | is | memory | per second | $ per hour | price from |",
        "|---|---|---|---|---|---|",
    ]
    for name in catalog.names("device"):
        one = plan.device(name)
        price = f"{one.price.usd_per_h:g} | {one.price.source}, {one.price.as_of}"
        memory, bandwidth = about_bytes(one.memory), about_bytes(one.bandwidth)
        lines.append(f"| `{name}` | {one.description} | {memory} | {bandwidth} | {price} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages and the picture, or compare them."""
    pages = {"commands.md": commands(), "gauges.md": gauges(), "workloads.md": workloads(), "bench.md": measuring()}
    pages |= {"documents.md": documents(), "errors.md": errors_page(), "metrics.md": metrics_page()}
    pages |= {"devices.md": devices(), "../pictures/variants.svg": picture.drawn()}
    pages |= {f"engine-{name}.md": engine_page(name) for name in engines.names()}
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
