"""The Compose files with the picker: valid for Compose and for Envoy, and endpoints by DNS."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from powerband.cli.main import app
from powerband.serve import envoy
from powerband.serve.discovery import Discovered
from powerband.serve.discovery.dns import HeadlessName

FOLDER = Path(__file__).parents[2] / "deploy" / "compose-picker"


def test_envoy_accepts_its_configuration() -> None:
    pytest.importorskip("grpc")
    argv = [envoy.program(), "--mode", "validate", "--config-path", str(FOLDER / "envoy.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_compose_file_is_valid_and_its_picker_has_known_options() -> None:
    file = FOLDER / "compose.yaml"
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    command = yaml.safe_load(file.read_text())["services"]["picker"]["command"]
    known = CliRunner().invoke(app, [command[0], "--help"]).stdout
    assert all(word in known for word in command if word.startswith("--"))


async def test_every_address_of_a_name_is_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [
        [(socket.AF_INET, 0, 0, "", ("10.0.0.2", 8000)), (socket.AF_INET6, 0, 0, "", ("fd00::1", 8000, 0, 0))],
        socket.gaierror(socket.EAI_AGAIN, "the server does not answer"),
        [(socket.AF_INET, 0, 0, "", ("10.0.0.3", 8000))],
        socket.gaierror(socket.EAI_NONAME, "there is no address"),
    ]
    done = asyncio.Event()

    async def resolve(*_: Any, **__: Any) -> Any:
        if not answers:
            done.set()
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    monkeypatch.setattr("powerband.serve.discovery.dns._POLL_S", 0.0)
    found: list[list[str]] = []

    def on_change(endpoints: Any) -> None:
        assert all(isinstance(one, Discovered) and one.ready is None for one in endpoints)
        found.append([one.address for one in endpoints])

    watching = asyncio.create_task(HeadlessName("engines", 8000).watch(on_change))
    await asyncio.wait_for(done.wait(), 5)
    watching.cancel()
    assert found == [["10.0.0.2:8000", "[fd00::1]:8000"], ["10.0.0.3:8000"], []]
