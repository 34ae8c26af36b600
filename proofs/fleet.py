"""What the proofs of `serve` share: fleets of real and of golden replicas, and a crowd that asks them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from quality import variants

from powerband import serve
from powerband.serve import Fleet
from support import fleets

WORDS = (Path(__file__).parent.parent / "README.md").read_text().split()


def real(folder: Path, *, scheme: str = "q8_0", slots: int = 4, name: str = "smollm2", **config: Any) -> Path:
    """Write a deployment of SmolLM2 on llama.cpp."""
    with ThreadPoolExecutor(1) as beside:  # making a variant runs an event loop of its own
        source = beside.submit(variants, scheme).result()[scheme]
    data = {
        "powerband": "deployment/1",
        "name": name,
        "variant": {"source": str(source)},
        "engine": "llamacpp",
        "config": {"parallel": slots, "ctx_size": 2048 * slots, "threads": 1, "threads_batch": 1, **config},
    }
    path = folder / f"{name}-{scheme}.json"
    path.write_text(json.dumps(data))
    return path


def recipe(folder: Path, deployment: dict[str, Any], *, ttft_s: float, **promised: float) -> Path:
    """Write a recipe for a deployment, with a promise of the first token."""
    slo = {"ttft": {"p95": ttft_s}}
    sure = {"value": 1.0, "low": 0.95, "high": 1.0}
    tokens = {"shape": "fixed", "tokens": 16}
    data = {
        "powerband": "recipe/1", "name": deployment["name"], "summary": "", "model": deployment["variant"]["source"],
        "model_digest": "", "scheme": "", "weights_digest": "", "engine_version": "", "deployment": deployment, "settings": {},
        "promise": {"slo": slo, "rate_per_s": 2.0, "attainment": sure, "in_flight": 4, **promised},
        "workload": {"arrivals": {"process": "poisson", "rate_per_s": 1}, "prompt": tokens, "output": tokens},
        "validity": {}, "usd_per_h": 0.1, "usd_per_1m_tokens": 1.0, "command": "",
    }  # fmt: skip
    path = folder / f"{deployment['name']}.recipe.json"
    path.write_text(json.dumps(data))
    return path


def written(folder: Path, **models: dict[str, Any]) -> Path:
    """Write a fleet."""
    path = folder / "fleet.json"
    path.write_text(json.dumps({"powerband": "fleet/1", "models": models}))
    return path


@contextlib.asynccontextmanager
async def running(path: Path, *, tls: tuple[str, str] | None = None) -> AsyncIterator[Fleet]:
    """Run a fleet until it is ready."""
    models, tenants = serve.resolve(path)
    folder = path.parent / f"run-{time.time_ns()}"
    folder.mkdir()
    async with serve.fleet(models, tenants=tenants, folder=folder, tls=tls) as fleet:
        await fleet.wait_until_ready(300)
        yield fleet


def text(words: int, seed: object) -> str:
    """Return so many words, the same for the same seed."""
    rng = random.Random(str(seed))
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass
class Answer:
    """What a client saw of one request."""

    asked_s: float
    status: int = 0
    tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    whole: bool = False
    error: str = ""  # an event that says what went wrong
    broke: str = ""  # the connection did
    headers: dict[str, str] = field(default_factory=dict)


async def ask(
    http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], *, tokens: int = 24, **headers: str
) -> Answer:
    """Ask for a stream, and note all that happens to it."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0}
    found, began = Answer(time.time()), time.monotonic()
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            found.status, found.headers = answer.status_code, dict(answer.headers)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.whole = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        found.error = event["error"]["code"]
                    elif event.get("choices") and event["choices"][0]["delta"].get("content"):
                        found.tokens += 1
                        found.first_s = found.first_s or time.monotonic() - began
    except httpx.HTTPError as error:
        found.broke = type(error).__name__
    found.total_s = time.monotonic() - began
    return found


def client(fleet: Fleet) -> httpx.AsyncClient:
    """Return a client with as many connections as it needs."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    trusted = ssl.create_default_context(cafile=fleet.spec.tls_cert) if fleet.spec.tls_cert else False
    return httpx.AsyncClient(base_url=fleet.url, trust_env=False, timeout=120, limits=limits, verify=trusted)


@contextlib.asynccontextmanager
async def load(http: httpx.AsyncClient, model: str, users: int, tokens: int) -> AsyncIterator[Counter[int]]:
    """Let users ask without a pause, each time something else; yield the status codes of the answers."""
    codes, ended = Counter[int](), asyncio.Event()

    async def user(number: int) -> None:
        while not ended.is_set():
            body = {"model": model, "prompt": f"{number} {codes.total()} {random.random()}", "max_tokens": tokens}
            codes[(await http.post("/v1/completions", json=body, timeout=120)).status_code] += 1

    tasks = [asyncio.create_task(user(number)) for number in range(users)]
    yield codes
    ended.set()
    await asyncio.gather(*tasks)


def golden_or_real(folder: Path, kind: str, replicas: int) -> tuple[Path, str]:
    """Write a fleet of golden servers or of llama.cpp; return its file and the name of its model."""
    folder.mkdir()
    if kind == "golden":
        return fleets.write(folder, models={"golden": {"replicas": replicas}}), "golden"
    return written(folder, smollm2={"recipe": str(real(folder, slots=4)), "replicas": replicas}), "smollm2"


def cpu_s(fleet: Fleet) -> float:
    """Return the CPU time of whatever stands between a client and an engine."""
    total = 0.0
    for one in fleets.processes(fleet):
        with contextlib.suppress(psutil.Error):
            line = " ".join(one.cmdline())
            if "keeper.py" not in line and any(
                part in line for part in ("router.picker", "_bin/envoy", "relay_process")
            ):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


async def settled(fleet: Fleet, count: int, within_s: float = 60) -> float:
    """Return after how many seconds so many replicas answer."""
    began = time.monotonic()
    while time.monotonic() < began + within_s:
        if sum(one["state"] == "ready" for one in fleet.status().get("replicas", [])) >= count:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    return float("inf")
