"""`powerband diagnose` against the golden server: only GETs, a first answer soon, and files to send."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest

from powerband.core.diagnosis import Diagnosis
from powerband.diagnose import DiagnoseSpec, diagnose
from powerband.diagnose.collect import Target
from powerband.diagnose.fleet import targets
from powerband.errors import InputError
from powerband.store import documents
from powerband.testing.golden import Golden

OPTIONS = {"max_num_queued_reqs": None, "model": "golden", "fault": None, "ttft_s": 0.05, "itl_s": 0.01}


class Noting(Golden):
    """A golden server that notes the method and path of each request."""

    def __init__(self, slots: int) -> None:
        super().__init__(Namespace(max_num_seqs=slots, **OPTIONS))
        self.seen: list[tuple[str, str]] = []

    async def route(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.seen.append((method, path))
        await super().route(method, path, body, writer)


async def serve(golden: Golden) -> tuple[asyncio.Server, str]:
    server = await asyncio.start_server(golden.serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_only_gets_are_sent_and_the_queue_is_seen() -> None:
    golden = Noting(slots=1)
    server, url = await serve(golden)
    answers: list[tuple[float, Diagnosis]] = []
    began = time.monotonic()

    async def ask() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for _ in range(4):
                await client.post(f"{url}/v1/completions", json={"prompt": "a b", "max_tokens": 60})

    asking = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0.2)
    golden.seen.clear()
    found = await diagnose(
        DiagnoseSpec(Target(url), window_s=3.0), on_first=lambda one: answers.append((time.monotonic() - began, one))
    )
    read = [(method, path) for method, path in golden.seen if path != "/v1/completions"]
    await asyncio.gather(*asking)
    server.close()
    assert {method for method, _ in read} == {"GET"}
    assert {path for _, path in read} <= {"/metrics", "/v1/models", "/version", "/props"}
    assert answers[0][0] < 5 and answers[0][1].preliminary and not found.preliminary
    one = found.observation
    assert one.running == pytest.approx(1.0, abs=0.3) and one.waiting is not None and one.waiting > 1
    assert found.resource == "queue"
    assert one.output_tokens_per_s == pytest.approx(60 / 0.65, rel=0.3)


async def test_the_command_line_writes_a_page_and_a_document(tmp_path: Path) -> None:
    golden = Noting(slots=4)
    server, url = await serve(golden)
    argv = [sys.executable, "-m", "powerband", "diagnose", url, "--for", "2s", "--output", str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False)
    server.close()
    assert done.returncode == 0, done.stderr
    assert "limited by: idle" in done.stdout and "preliminary" in done.stderr
    document = documents.read(tmp_path / "diagnosis.json")
    assert isinstance(document, Diagnosis) and document.observation.engine == "fake"
    page = (tmp_path / "diagnosis.html").read_text()
    assert "<script" not in page and not re.search(r"(?:src|href)=['\"](?!https://)", page)


def test_what_is_no_server_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no server answers"):
        asyncio.run(diagnose(DiagnoseSpec(Target("http://127.0.0.1:9"), window_s=1.0)))
    with pytest.raises(InputError, match=r"status\.json is missing"):
        targets(Target(str(tmp_path)))


def test_the_replicas_of_a_fleet_are_targets(tmp_path: Path) -> None:
    replicas = [{"engine": "http://127.0.0.1:1234", "pid": 1}, {"engine": None, "pid": None}]
    (tmp_path / "status.json").write_text(json.dumps({"replicas": replicas}))
    assert [(one.url, one.pid) for one in targets(Target(str(tmp_path)))] == [("http://127.0.0.1:1234", 1)]
