"""Start real engines with planted faults, diagnose them under load, apply the proposed change, and measure both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from powerband import engines
from powerband.core.diagnosis import Diagnosis, Finding
from powerband.core.slo import SLO
from powerband.diagnose import DiagnoseSpec, diagnose
from powerband.diagnose.collect import Target, command_words
from powerband.engines import live
from powerband.runtime import installations
from support import models
from support.engines import deployment

PORT = 18500
SLO_USED = SLO(name="interactive", ttft={"p95": 1.0}, tpot={"p95": 0.1})


@dataclass(frozen=True)
class Fault:
    """One planted fault: what is started, the traffic, and the rules that name the cause."""

    name: str
    engine: str
    config: dict[str, Any]
    rules: tuple[str, ...]
    workload: str = "chat"
    users: int = 8
    source: str = "gguf"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """What was found of a fault, and what its change brought."""

    fault: Fault
    rank: int | None = None
    named: list[str] = field(default_factory=list)
    finding: Finding | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Return after over before, of the metric that the finding names."""
        if self.finding is None or not self.before or not self.after:
            return None
        key = {"output tokens/s": "output", "prompt tokens/s": "prompt", "TTFT": "ttft", "TPOT": "tpot"}
        name = key.get(self.finding.effect.metric)
        if name is None or not self.before.get(name):
            return None
        return self.after[name] / self.before[name]

    @property
    def as_said(self) -> bool | None:
        """Return whether the change brought what was said; None: nothing measurable was said."""
        if self.finding is None:
            return None
        if self.finding.effect.metric == "rejected requests":
            return self.before.get("failed", 0.0) > 0 and self.after.get("failed", 1.0) == 0
        factor = self.finding.effect.factor
        if factor is None or self.ratio is None:
            return None
        return factor.low <= self.ratio <= factor.high

    def row(self) -> str:
        """Return the result on a few lines."""
        one = self.finding
        lines = [
            f"{self.fault.engine} {self.fault.name}: found as number {self.rank or '-'} of {', '.join(self.named[:4])}"
        ]
        if one is not None:
            said = f"{one.effect.factor.low:.2f} to {one.effect.factor.high:.2f}" if one.effect.factor else "no figure"
            measured = (
                f"{self.ratio:.2f}"
                if self.ratio is not None
                else f"failed {self.before.get('failed', 0):.0%} -> {self.after.get('failed', 0):.0%}"
            )
            lines.append(f"    change {one.change.short}")
            lines.append(
                f"    {one.effect.metric}: said x {said}, measured x {measured} {'(as said)' if self.as_said else '(not as said)'}"
            )
        return "\n".join(lines)


def command_of(fault: Fault) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line and the environment of a faulty server."""
    made = models.smollm2()
    source = {"gguf": made.gguf, "q4_0": made.q4_0, "safetensors": made.safetensors}[fault.source]
    found = deployment(fault.engine, base=False, source=source, **fault.config)
    command = engines.get(fault.engine).command(found, installation=installations.find(fault.engine), port=PORT)
    return command.argv, {**command.env, **fault.environment}


@contextlib.asynccontextmanager
async def running(argv: Sequence[str], environment: dict[str, str], log: Path) -> AsyncIterator[str]:
    """Run a server until it is healthy, and stop it after; yields its address."""
    url = f"http://127.0.0.1:{PORT}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            list(argv), env={**os.environ, **environment}, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            deadline = time.monotonic() + 240
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/health")).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.25)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for _ in range(100):  # children of vLLM free their memory
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            await asyncio.sleep(0.1)


async def measured(url: str, fault: Fault, seconds: float) -> dict[str, float]:
    """Run `powerband bench` with the fault's traffic; return rates and means."""
    tokenizer = models.smollm2().safetensors
    argv = [sys.executable, "-m", "powerband", "bench", url, "--workload", fault.workload, "--users", str(fault.users)]
    argv += ["--duration", f"{seconds:.0f}s", "--tokenizer", str(tokenizer), "--json", "--force", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *argv, "--output", folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        files = list(Path(folder).glob("measurement.json"))
        text = files[0].read_text() if files else out.decode()
    try:
        data = json.loads(text.strip().splitlines()[-1])
        level = data["levels"][-1]
    except (ValueError, KeyError, IndexError):
        raise RuntimeError(f"bench failed: {out.decode()[-600:]} {err.decode()[-600:]}") from None
    found = {"output": level.get("output_tokens_per_s", 0.0), "failed": 0.0}
    for name in ("ttft", "tpot"):
        if name in level.get("latencies", {}):
            found[name] = level["latencies"][name]["mean"]["value"]
    if found.get("ttft"):
        found["prompt"] = 1 / found["ttft"]
    requests, errors = level.get("requests", 0), sum((level.get("errors") or {}).values())
    found["failed"] = errors / max(1, requests + errors)
    return found


async def under_load(url: str, fault: Fault, seconds: float) -> tuple[Diagnosis, dict[str, float]]:
    """Diagnose while `bench` sends the traffic."""
    loading = asyncio.create_task(measured(url, fault, seconds))
    await asyncio.sleep(6)
    found = await diagnose(DiagnoseSpec(Target(url), window_s=seconds - 4, slo=SLO_USED))
    return found, await loading


async def plant(fault: Fault, *, seconds: float = 24, fixed: dict[str, Any] | None = None) -> Result:
    """Start a faulty server, diagnose it under load, apply the proposed change, and measure again."""
    result = Result(fault)
    argv, environment = command_of(fault)
    with tempfile.TemporaryDirectory() as folder:
        async with running(argv, environment, Path(folder) / "faulty.log") as url:
            found, result.before = await under_load(url, fault, seconds)
        result.named = [one.rule for one in found.findings]
        planted = [number for number, one in enumerate(found.findings, 1) if one.rule in fault.rules]
        if not planted:
            return result
        result.rank = planted[0]
        result.finding = found.findings[planted[0] - 1]
        if result.finding.change.command is None:
            return result
        words, variables = command_words(result.finding.change.command)
        after = {**environment, **variables}
        if words[0] == "env":  # env -u NAME: the variable is not set any more
            while len(words) > 2 and words[1] == "-u":
                after.pop(words[2], None)
                words = (words[0], *words[3:])
            more, set_here = command_words(shlex.join(words[1:]))
            words, after = more, {**after, **set_here}
        async with running(words, after, Path(folder) / "changed.log") as url:
            result.after = await measured(url, fault, seconds)
    return result


def settings_of(engine: str, command: str) -> dict[str, Any]:
    """Return the settings of a command line, to compare two of them."""
    words, environment = command_words(command)
    return live.read_command(engine, words, environment).settings
