"""Write the reference pages from the code; `--check` fails where a page is out of date."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import typer

from powerband import engines
from powerband.cli.main import app
from powerband.core.engine import FailureKind
from powerband.engines import knobs, rules
from powerband.metrics import GAUGES

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n"


def commands() -> str:
    """Every command with its arguments and options."""
    lines = [
        NOTE,
        "# Commands",
        "",
        "Exit codes: 0 fine, 1 our bug, 2 your input, 3 the engine, 4 the promise was not met.",
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
    if "anyOf" in schema:
        return " or ".join(takes(one) for one in schema["anyOf"] if one.get("type") != "null")
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
    lines += ["", "## Kinds of failure", "", ", ".join(f"`{kind}`" for kind in typing.get_args(FailureKind))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages, or compare them."""
    pages = {"commands.md": commands(), "gauges.md": gauges()}
    pages |= {f"engine-{name}.md": engine_page(name) for name in engines.names()}
    FOLDER.mkdir(exist_ok=True)
    stale = [
        name for name, text in pages.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run 'python docs/generate.py'" if stale else 0)
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
