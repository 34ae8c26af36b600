"""The command line: output, exit codes, hints, and no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def powerband(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "powerband", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def test_version() -> None:
    first, second, third = powerband("--version").stdout.splitlines()
    assert re.fullmatch(r"powerband \d+\.\d+\.\d+", first) and second.startswith("Python 3.")
    assert third.startswith("engines: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chek"], "Did you mean 'check'"),
        (["check", "--her", "x"], "--here"),
        (["check", "/no/such/file.yaml"], "file /no/such/file.yaml not found"),
        (["schema", "deploymnt"], "Did you mean 'deployment'?"),
        (["engine", "install", "vlm"], "Did you mean 'vllm'?"),
        (["engine", "install", "openai"], "there is no installable engine 'openai'"),
        (["run", "x", "--engine", "fake", "--set", "ttft"], "is not KNOB=VALUE"),
        (["run", "x", "--engine", "fake", "--set", "tftf_s=1s"], "Did you mean 'ttft_s'?"),
        (["run", "x", "--engine", "fake", "--ready-timeout", "soon"], "has no known unit"),
        (["run", "x", "--engine", "fake", "--set", "max_num_seqs=8", "--set", "max_num_queued_reqs=2"], "is below"),
    ],
)
def test_a_wrong_call_prints_an_error_with_a_hint_and_exits_with_2(args: list[str], message: str) -> None:
    done = powerband(*args)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_is_json_with_the_json_option() -> None:
    done = powerband("check", "/no/such/file.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == done.returncode == 2
    assert error["hint"] and done.stderr == ""


def test_an_engine_failure_is_exit_3_and_typed() -> None:
    done = powerband("run", "x", "--engine", "fake", "--set", "fault=out_of_memory", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"], error["failure"]) == (3, 3, "out_of_memory")


@pytest.mark.parametrize("args", [["doctor"], ["engine", "list"], ["schema", "slo"]])
def test_every_reading_command_prints_json(args: list[str]) -> None:
    assert json.loads(powerband(*args, "--json").stdout)


def test_check_and_show_print_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("powerband: slo/1\nttft: {p95: 1s}\n")
    checked = json.loads(powerband("check", str(file), "--json").stdout)
    shown = json.loads(powerband("show", str(file), "--json").stdout)
    assert checked["digest"] == shown["digest"]
    assert shown["ttft"] == {"p95": 1.0}
    assert powerband("show", str(file)).stdout.splitlines()[-1] == "  p95: 1s"


def test_a_dry_run_prints_the_command_and_starts_nothing() -> None:
    done = powerband("run", "x", "--engine", "fake", "--set", "itl_s=5ms", "--dry-run")
    assert done.stdout.endswith("--model x --itl-s 0.005\n")


def test_output_is_plain_without_a_terminal() -> None:
    assert "\x1b[" not in powerband("doctor").stdout + powerband("engine", "list").stdout


class Running:
    """A `powerband run` in the background; the constructor waits until it is ready."""

    def __init__(self, *args: str) -> None:
        argv = [sys.executable, "-m", "powerband", "run", *args, "--json"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=15)
        return self.process.returncode


def test_attach_starts_nothing_and_stops_nothing(tmp_path: Path) -> None:
    server = Running("golden", "--engine", "fake", "--run-dir", str(tmp_path / "one"))
    attached = Running(server.ready["url"], "--run-dir", str(tmp_path / "two"))
    assert attached.ready["event"] == "ready"
    assert (attached.ready["url"], attached.ready["pid"]) == (server.ready["url"], None)
    assert attached.stop() == 0
    again = Running(server.ready["url"], "--run-dir", str(tmp_path / "three"))
    assert again.ready["event"] == "ready"
    assert again.stop() == 0 == server.stop()


def test_a_deployment_file_runs_and_options_override_it(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("powerband: deployment/1\nvariant: {source: golden}\nengine: fake\nconfig: {itl_s: 9ms}\n")
    running = Running(str(file), "--set", "ttft_s=3ms", "--run-dir", str(tmp_path / "run"))
    assert "--ttft-s 0.003 --itl-s 0.009" in running.ready["command"]
    assert running.stop() == 0
    written = (tmp_path / "run" / "deployment.yaml").read_text()
    assert "itl_s: 9ms" in written and "ttft_s: 3ms" in written
