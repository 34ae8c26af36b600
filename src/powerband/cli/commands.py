"""The command classes: grouped help, examples, and options and commands that were renamed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Help shows the commands in these groups, in this order.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Plan": ("doctor", "selftest", "adopt", "list", "engine", "plan"),
    "Measure": ("run", "bench", "quantize", "evaluate", "diff", "import"),
    "Tune": ("tune", "verify"),
    "Serve": ("serve", "picker", "key", "rollout", "export"),
    "Operate": ("diagnose", "top", "observe", "capture", "scale"),
    "Documents": ("check", "show", "schema"),
}

# Names of 0.1 that still work, with a deprecation line on stderr.
RENAMED_COMMANDS: Mapping[str, str] = {}
RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "evaluate": {"--floor": "--quality", "--whole": "--full", "--again": "--refresh"},
    "observe": {"--every": "--interval"},
    "quantize": {"--served": "--target-workload"},
    "rollout": {"--share": "--canary-weight", "--patience": "--timeout"},
    "tune": {"--profile": "--slo"},
}
_RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "tune --profile": {"chat": "interactive", "batch": "batch", "hybrid": "reading-speed"}
}

_RANGE = re.compile(r"\s*\[[\d.<=>]*x[\d.<=>]*\]|;\s*[\d.<=>]*x[\d.<=>]*(?=\])")  # '[x>=1]' in Typer's help
_PARENTHESES = re.compile(r"\[default: \((.*)\)\]")  # Typer puts a described default into parentheses


class Command(TyperCommand):
    """A command whose help ends with examples and that accepts the names its options had in 0.1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace renamed options, then parse."""
        return super().parse_args(ctx, _with_current_names(self.name or "", args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line: options, then the arguments by their metavar."""
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(_argument(one, brackets=True) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options; value ranges and type names are left out."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for one in self.get_params(ctx):
            if record := one.get_help_record(ctx):
                name, text = record[0], _PARENTHESES.sub(r"[default: \1]", _RANGE.sub("", record[1]))
                if one.param_type_name == "argument":
                    name, text = _argument(one), text.replace("  [required]", "")
                rows[one.param_type_name].append((name, text))
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows[kind]:
                with formatter.section(title):
                    formatter.write_dl(rows[kind])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one to a line, never wrapped."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n")


class Group(TyperGroup):
    """The root command: help lists the commands in groups, each with its whole summary."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the help."""
        return [name for names in GROUPS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name or by the name it had in 0.1."""
        if cmd_name in RENAMED_COMMANDS:
            _deprecated(f"powerband {cmd_name}", f"powerband {RENAMED_COMMANDS[cmd_name]}")
        return super().get_command(ctx, RENAMED_COMMANDS.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of commands."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary(self.get_command(ctx, name))) for name in names])


def summary(command: Any) -> str:
    """Return the first sentence of a command's help."""
    return str(command.help or "").strip().split("\n", 1)[0]


def _argument(argument: Any, *, brackets: bool = False) -> str:
    name = str(argument.metavar or argument.name.upper()).strip("[]")
    return f"[{name}]" if brackets and not argument.required else name


def _with_current_names(command: str, args: list[str]) -> list[str]:
    renamed, current = RENAMED_OPTIONS.get(command, {}), list(args)
    for position, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name not in renamed:
            continue
        _deprecated(f"powerband {command} {name}", renamed[name])
        values = _RENAMED_VALUES.get(f"{command} {name}", {})
        current[position] = renamed[name] + equals + values.get(value, value)
        if values and not equals and position + 1 < len(args):
            current[position + 1] = values.get(args[position + 1], args[position + 1])
    return current


def _deprecated(old: str, new: str) -> None:
    print(f"warning: '{old}' is deprecated; use '{new}'", file=sys.stderr)
