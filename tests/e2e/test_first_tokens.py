"""From a model on disk to a chat answered over HTTP, through the command line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from powerband.runtime import installations
from support import models

BOTH = [
    pytest.param("llamacpp", ["ctx_size=4096", "parallel=2"], marks=pytest.mark.llamacpp),
    pytest.param(
        "vllm", ["enforce_eager=true", "kv_cache_memory_bytes=512MiB", "max_model_len=2048"], marks=pytest.mark.vllm
    ),
]


def run(engine: str, settings: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    model = models.smollm2()
    source = model.gguf if engine == "llamacpp" else model.safetensors
    argv = [
        sys.executable,
        "-m",
        "powerband",
        "run",
        str(source),
        "--engine",
        engine,
        "--json",
        "--run-dir",
        str(tmp_path),
    ]
    argv += [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(("engine", "settings"), BOTH)
def test_run_answers_a_chat(engine: str, settings: list[str], tmp_path: Path) -> None:
    process = run(engine, settings, tmp_path)
    try:
        assert process.stdout is not None
        ready: dict[str, Any] = json.loads(process.stdout.readline())
        assert ready["event"] == "ready", ready
        body = {
            "model": ready["model"],
            "messages": [{"role": "user", "content": "Name the first three months of the year."}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = httpx.post(f"{ready['url']}/v1/chat/completions", json=body, timeout=60).json()
        assert "February" in answer["choices"][0]["message"]["content"]
        assert ready["memory_bytes"] > 50 * 2**20
        assert len(ready["phases"]) >= 4
        assert abs(sum(ready["phases"].values()) - ready["startup_s"]) < 0.1
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=15)
    assert json.loads(rest)["event"] == "stopped"
    assert process.returncode == 0


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.llamacpp
def test_the_printed_command_is_the_one_that_runs(tmp_path: Path) -> None:
    process = run("llamacpp", ["ctx_size=2048"], tmp_path)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=15)
    pasted = subprocess.Popen(["/bin/sh", "-c", "exec " + ready["command"]], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not healthy(ready["url"]):
            assert time.monotonic() < deadline, "the pasted command did not become healthy"
            time.sleep(0.1)
    finally:
        pasted.kill()
        pasted.wait()


@pytest.mark.llamacpp
def test_the_tools_that_come_with_llamacpp_run() -> None:
    tools = installations.find("llamacpp").tools
    for name in ("llama-quantize", "llama-perplexity", "llama-imatrix"):
        said = subprocess.run([tools[name], "--help"], capture_output=True, text=True)
        assert "usage" in (said.stdout + said.stderr).lower(), name
