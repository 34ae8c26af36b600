"""Start real engines with planted faults, diagnose them under load, apply the proposed change, and measure both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
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
from powerband.core.workload import Workload
from powerband.diagnose import DiagnoseSpec, diagnose
from powerband.diagnose.collect import Target, command_words
from powerband.load import prompts, tokens
from powerband.runtime import installations
from powerband.store import documents
from support import models
from support.engines import deployment

PORT = 18500
NOISE = 0.05  # of a window of 14 s
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
    most_output: int = 48  # tokens of an answer, so that a window has many


@dataclass
class Result:
    """What was found of a fault, and what its change brought."""

    fault: Fault
    rank: int | None = None
    named: list[str] = field(default_factory=list)
    finding: Finding | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    problem: str = ""  # the changed command does not start, or cannot be measured

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
        if self.problem:
            return False
        if self.finding.effect.metric == "rejected requests":
            return self.before.get("failed", 0.0) > 0 and self.after.get("failed", 1.0) == 0
        factor = self.finding.effect.factor
        if factor is None or self.ratio is None:
            return None
        return factor.low * (1 - NOISE) <= self.ratio <= factor.high * (1 + NOISE)

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
        if self.problem:
            lines.append(f"    {self.problem[-400:]}")
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


@dataclass
class Answers:
    """What the users saw: the time of every token, and of every request that began and ended."""

    tokens_s: list[float] = field(default_factory=list)
    first_s: list[tuple[float, float]] = field(default_factory=list)  # when, TTFT
    gaps_s: list[tuple[float, float]] = field(default_factory=list)  # when, time since the token before
    ended_s: list[float] = field(default_factory=list)
    failed_s: list[float] = field(default_factory=list)


async def measured(url: str, fault: Fault, seconds: float) -> dict[str, float]:
    """Send the fault's traffic from the catalogue in a closed loop; return rates and means of all but the first 5 s.

    Users are cut off at the end: `bench` would wait for their answers, which takes minutes on a faulty server.
    """
    found = documents.find("workload", fault.workload)
    assert isinstance(found, Workload)
    workload = found.model_copy(update={"turns": None}).at_rate(1.0)
    vocabulary = tokens.vocabulary(models.smollm2().safetensors)
    traffic = prompts.prepare(workload, 600, vocabulary=vocabulary)
    numbers, seen = itertools.count(), Answers()
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]

        async def user() -> None:
            while True:
                number = next(numbers) % len(traffic)
                adapter = traffic.adapters[number] if traffic.adapters else None
                body = {
                    "model": adapter.name if adapter else model,
                    "messages": traffic.messages(number),
                    "max_tokens": min(fault.most_output, traffic.output_tokens[number]),
                    "stream": True,
                    "ignore_eos": True,
                    "temperature": 0.8,
                }
                await ask(client, f"{url}/v1/chat/completions", body, seen)

        began = time.monotonic()
        users = [asyncio.create_task(user()) for _ in range(fault.users)]
        await asyncio.sleep(5 + seconds)
        for one in users:
            one.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    ended = time.monotonic()
    since = began + 5

    def mean(pairs: list[tuple[float, float]]) -> float | None:
        values = [value for at, value in pairs if at >= since]
        return sum(values) / len(values) if values else None

    tokens_seen = sum(at >= since for at in seen.tokens_s)
    whole, failed = (sum(at >= since for at in times) for times in (seen.ended_s, seen.failed_s))
    result = {"output": tokens_seen / (ended - since), "failed": failed / max(1, whole + failed)}
    ttft, tpot = mean(seen.first_s), mean(seen.gaps_s)
    result |= {"ttft": ttft, "prompt": 1 / ttft} if ttft else {}
    return result | ({"tpot": tpot} if tpot else {})


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], seen: Answers) -> None:
    """Stream one answer and note its times."""
    sent, last = time.monotonic(), None
    try:
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                seen.failed_s.append(time.monotonic())
                await asyncio.sleep(0.2)
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {") or '"delta"' not in line:
                    continue
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if not delta.get("content"):
                    continue
                now = time.monotonic()
                seen.tokens_s.append(now)
                if last is None:
                    seen.first_s.append((now, now - sent))
                else:
                    seen.gaps_s.append((now, now - last))
                last = now
        (seen.failed_s if last is None else seen.ended_s).append(time.monotonic())  # an error can come in the stream
    except httpx.HTTPError:
        seen.failed_s.append(time.monotonic())


async def under_load(url: str, fault: Fault, seconds: float) -> tuple[Diagnosis, dict[str, float]]:
    """Diagnose while users send the traffic."""
    loading = asyncio.create_task(measured(url, fault, seconds))
    await asyncio.sleep(4)
    found = await diagnose(DiagnoseSpec(Target(url), window_s=seconds - 1, slo=SLO_USED))
    return found, await loading


async def plant(fault: Fault, *, seconds: float = 14) -> Result:
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
        try:
            async with running(words, after, Path(folder) / "changed.log") as url:
                result.after = await measured(url, fault, seconds)
        except RuntimeError as error:
            result.problem = str(error)
    return result
