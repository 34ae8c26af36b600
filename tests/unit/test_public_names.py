"""The public names and the command line's options are frozen: a change here is a change for users."""

import json
from pathlib import Path
from typing import Any

import typer

import powerband
from powerband.cli.main import app

GOLDEN = Path(__file__).with_name("command_line.json")


def test_public_names() -> None:
    assert sorted(powerband.__all__) == [
        "Deployment",
        "Measurement",
        "PowerbandError",
        "SLO",
        "Workload",
        "__version__",
        "launch",
        "parse",
        "prepare",
        "read",
    ]
    assert all(getattr(powerband, name) is not None for name in powerband.__all__)


def options(command: Any, path: str) -> dict[str, list[str]]:
    if hasattr(command, "commands"):
        below = [options(sub, f"{path} {name}") for name, sub in sorted(command.commands.items())]
        return {key: value for one in below for key, value in one.items()}
    words = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words.append(str(parameter.name))
        else:
            words += parameter.opts + parameter.secondary_opts
    return {path: sorted(words)}


def test_command_line_options() -> None:
    found = options(typer.main.get_command(app), "powerband")
    assert found == json.loads(GOLDEN.read_text()), "update command_line.json and tell users in the CHANGELOG"
    assert all("--json" in words for words in found.values())
