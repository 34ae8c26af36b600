"""The public names and the command line's options are frozen: a change here is a change for users."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import powerband
from powerband import engines, errors
from powerband.cli import export, options
from powerband.cli.commands import GROUPS, RENAMED_COMMANDS, RENAMED_OPTIONS, summary
from powerband.cli.main import app
from powerband.export import TARGETS

GOLDEN = Path(__file__).with_name("command_line.json")
ROOT_COMMAND: Any = typer.main.get_command(app)


def test_public_names() -> None:
    assert sorted(powerband.__all__) == [
        "Deployment",
        "Evaluation",
        "Measurement",
        "Plan",
        "PowerbandError",
        "QualityFloor",
        "Recipe",
        "SLO",
        "Study",
        "Workload",
        "__version__",
        "aio",
        "bench",
        "evaluate",
        "launch",
        "parse",
        "plan",
        "prepare",
        "read",
        "tune",
        "verify",
    ]
    assert all(getattr(powerband, name) is not None for name in powerband.__all__)


def commands(command: Any, path: str) -> dict[str, Any]:
    if hasattr(command, "commands"):
        below = [commands(sub, f"{path} {name}") for name, sub in sorted(command.commands.items())]
        return {key: value for one in below for key, value in one.items()}
    return {path: command}


ALL = commands(ROOT_COMMAND, "powerband")


def names(command: Any) -> list[str]:
    words = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words.append(str(parameter.name))
        else:
            words += parameter.opts + parameter.secondary_opts
    return sorted(words)


def test_command_line_options() -> None:
    found: dict[str, Any] = {path: names(command) for path, command in ALL.items()}
    found["renamed"] = {"commands": dict(RENAMED_COMMANDS), "options": {k: dict(v) for k, v in RENAMED_OPTIONS.items()}}
    assert found == json.loads(GOLDEN.read_text()), "update command_line.json and tell users in the CHANGELOG"
    assert all("--json" in names(command) for command in ALL.values())


def test_every_command_is_in_a_help_group() -> None:
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(ROOT_COMMAND.commands)


@pytest.mark.parametrize("path", ALL)
def test_help_fits_80_columns_and_leaks_no_internals(path: str) -> None:
    text = CliRunner().invoke(app, [*path.split()[1:], "--help"], env={"COLUMNS": "80"}).stdout
    assert not re.search(r"<\w+|\{\w+\}|x>=", text), text
    assert "Examples:" in text
    assert all(len(line) <= 80 for line in text.splitlines()), max(text.splitlines(), key=len)
    assert len(summary(ALL[path])) <= 72, "the group's help shows it on one line"


def test_the_help_of_the_program_shows_every_summary_whole() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    for name in (name for group in GROUPS.values() for name in group):
        assert summary(ROOT_COMMAND.commands[name]) in text


def test_choices_are_those_of_the_registries() -> None:
    assert sorted(options.ENGINES) == sorted(engines.names())
    assert sorted(export.TARGETS) == sorted(TARGETS)


def test_exit_codes_are_distinct_and_documented() -> None:
    classes = (errors.PowerbandError, errors.InputError, errors.EngineError, errors.RequirementNotMet,
               errors.InvalidMeasurement, errors.Undecided)  # fmt: skip
    codes = [one.exit_code for one in classes]
    assert codes == [1, 2, 3, 4, 5, 6] and {0, *codes, 130} == set(errors.EXIT_CODES)


@pytest.mark.parametrize(
    ("args", "new"),
    [
        (["tune", "missing", "--on", "h100", "--profile", "hybrid"], "--slo"),
        (["evaluate", "missing.yaml", "--reference", "missing.yaml", "--floor=strict"], "--quality"),
    ],
)
def test_renamed_commands_and_options_still_work(args: list[str], new: str) -> None:
    outcome = CliRunner().invoke(app, args)
    assert f"is deprecated; use '{new}'" in outcome.stderr
    assert isinstance(outcome.exception, errors.InputError), "the option was accepted; the file is missing"
