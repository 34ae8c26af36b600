"""Start a real engine on SmolLM2 and talk to it: for the end-to-end tests and the proofs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.launchers import local
from powerband.runtime.replica import Replica
from support import models

# Small and quick to start; every test adds the knob that it is about.
BASE: dict[str, dict[str, Any]] = {
    "vllm": {
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": "512MiB",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    },
    "llamacpp": {"ctx_size": 8192, "parallel": 4, "cache_ram": 0},
}


def deployment(engine: str, *, base: bool = True, source: Path | None = None, **config: Any) -> Deployment[Any]:
    """Return a deployment of SmolLM2 on that engine."""
    model = models.smollm2()
    source = source or (model.gguf if engine == "llamacpp" else model.safetensors)
    data = {"name": "smollm2", "variant": {"source": str(source)}, "engine": engine}
    return engines.deployment_type(engine).model_validate(data | {"config": (BASE[engine] if base else {}) | config})


@contextlib.asynccontextmanager
async def started(
    engine: str, *, force: bool = False, ready_timeout_s: float = 300, source: Path | None = None, **config: Any
) -> AsyncIterator[Server]:
    """Start SmolLM2 with these knobs, and stop it after."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = local.prepare(deployment(engine, source=source, **config), force=force)
        launching = local.launch(prepared, directory=Path(folder), ready_timeout_s=ready_timeout_s)
        async with launching as replica, httpx.AsyncClient(trust_env=False, timeout=600) as client:
            yield Server(replica, client)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    text: str
    finished: float  # on the monotonic clock


@dataclass
class Server:
    """A ready engine and a client to it."""

    replica: Replica
    client: httpx.AsyncClient

    async def complete(self, prompt: str, *, max_tokens: int = 16, **extra: Any) -> Answer:
        """Complete a prompt greedily."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **extra}
        answer = await self.client.post(f"{self.replica.url}/v1/completions", json=body)
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        return Answer(answer.status_code, text, time.monotonic())

    async def chat(self, content: str, *, max_tokens: int = 16, **extra: Any) -> Answer:
        """Answer one message greedily."""
        messages = [{"role": "user", "content": content}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **extra}
        answer = await self.client.post(f"{self.replica.url}/v1/chat/completions", json=body)
        text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
        return Answer(answer.status_code, text, time.monotonic())

    async def page(self, path: str) -> str:
        """Return one of the engine's own pages."""
        return (await self.client.get(self.replica.url + path)).text

    def log(self) -> str:
        """Return the engine's log so far."""
        return self.replica.log_path.read_text(errors="replace")


def long_prompt(words: int, *, salt: str = "") -> str:
    """Return plain prose of about that many tokens, whose beginning differs with the salt."""
    facts = (
        "the river",
        "a small boat",
        "an old bridge",
        "the harbour",
        "a quiet street",
        "the market",
        "a stone wall",
    )
    return salt + " ".join(f"Then we saw {facts[i % 7]} number {i}." for i in range(words // 8))
