"""Two real replicas behind one address, through the command line."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import models

pytest.importorskip("grpc")
TALE = [{"role": "user", "content": "Tell me a long tale about the sea."}]


@pytest.mark.llamacpp
async def test_a_fleet_of_llama_cpp_outlives_one_of_its_replicas(tmp_path: Path) -> None:
    deployment = {
        "powerband": "deployment/1",
        "name": "smollm2",
        "variant": {"source": str(models.smollm2().gguf)},
        "engine": "llamacpp",
        "config": {"ctx_size": 4096, "parallel": 4, "threads": 1},
    }
    (tmp_path / "d.json").write_text(json.dumps(deployment))
    argv = [sys.executable, "-m", "powerband", "serve", str(tmp_path / "d.json"), "--replicas", "2", "--json"]
    process = subprocess.Popen([*argv, "--run-dir", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready: dict[str, Any] = json.loads(await asyncio.to_thread(process.stdout.readline))
        async with httpx.AsyncClient(base_url=ready["url"], trust_env=False, timeout=60) as http:
            body = {"model": "smollm2", "messages": TALE, "max_tokens": 64, "stream": True}

            async def stream() -> list[str]:
                found = []
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        found += [line] if line.startswith("data: ") else []
                return found

            streams = [asyncio.create_task(stream()) for _ in range(6)]
            await asyncio.sleep(0.7)
            status = json.loads((tmp_path / "run" / "status.json").read_text())
            os.kill(status["replicas"][0]["pid"], signal.SIGKILL)
            for found in await asyncio.gather(*streams):
                assert found[-1] == "data: [DONE]" or "replica_died" in found[-1]
            answer = await http.post("/v1/chat/completions", json={**body, "stream": False, "max_tokens": 4})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout is not None
        process.stdout.close()
