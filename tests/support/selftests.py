"""Self-tests on hosts of the lab, and what is looked for in their bundles."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from powerband.testing.lab import host as lab

GB = 10**9
H100 = {"device": "h100-sxm"}


def environment(tmp_path: Path, *groups: dict[str, Any], **more: Any) -> dict[str, str]:
    spec = lab.HostSpec.model_validate({"name": "server", "devices": groups, "cores": 96, "numa_nodes": 2, **more})
    folder = lab.build(lab.Lab(hosts=(spec,), start_scale=0.02, seed=7), tmp_path / "lab")["server"]
    return lab.environment(folder)


def selftest(
    tmp_path: Path, environment: dict[str, str], model: Path, *options: str
) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any], str]:
    """Run a self-test; return its exit code, its checks by name, its bundle, and what it printed."""
    output = tmp_path / "selftest.json"
    argv = [sys.executable, "-m", "powerband", "selftest", str(model), "--engine", "vllm", "--output", str(output)]
    done = subprocess.run([*argv, *options], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert output.exists(), done.stderr[-3000:]
    bundle = json.loads(output.read_text())
    return done.returncode, {one["check"]: one for one in bundle["checks"]}, bundle, done.stdout + done.stderr


def private(text: str, *more: str) -> list[str]:
    """Return the names and paths of this machine that a text has."""
    names = (socket.gethostname(), getpass.getuser(), os.environ["HOME"], *more)
    return [one for one in names if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text)]


PLAN_ONLY = """
import asyncio, sys
import powerband.plan as plan
from powerband import selftest
from powerband.plan import calibrate
known = plan.coefficients(calibrate.saved())
plan.coefficients = lambda *_: known  # the check compares with the catalogue only
selftest.ENGINE_CHECKS = selftest.shared_start.CHECKS[:3]
spec = selftest.SelftestSpec(models=(sys.argv[1],), engine=sys.argv[2], probe_s=float(sys.argv[3]))
checks = asyncio.run(selftest.run(spec)).found.checks
print(next(one.figures["error_before"] for one in checks if one.check == "plan"))
"""


def planned_error(environment: dict[str, str], model: Path, engine: str, *, probe_s: float) -> float:
    """Measure the error of the plan again, with new probes."""
    argv = [sys.executable, "-c", PLAN_ONLY, str(model), engine, str(probe_s)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout)


def adopt(tmp_path: Path, environment: dict[str, str]) -> dict[str, list[str]]:
    argv = [sys.executable, "-m", "powerband", "adopt", str(tmp_path / "selftest.json"), "--json"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))
