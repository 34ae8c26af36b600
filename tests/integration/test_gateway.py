"""Envoy without a picker: no request reaches a replica, whatever headers its client sends."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from powerband.serve import envoy, relay
from support.golden import free_port, golden, wait_for

pytest.importorskip("grpc")
BODY = {"model": "golden", "prompt": "hello", "max_tokens": 2}


@contextlib.contextmanager
def gateway(folder: Path, replica: str) -> Iterator[str]:
    """Run Envoy with one replica and a redirector, and no picker; yield its URL."""
    port, redirector = free_port(), free_port()
    endpoints = folder / "endpoints" / "replicas.json"
    endpoints.parent.mkdir()
    endpoints.write_text(envoy.endpoints([replica], redirector=f"127.0.0.1:{redirector}", version="1"))
    settings = envoy.bootstrap(
        host="127.0.0.1", port=port, admin_port=free_port(), picker=folder / "picker.sock", endpoints=endpoints
    )
    (folder / "envoy.json").write_text(json.dumps(settings))
    commands = [
        relay.command("127.0.0.1", redirector, 0).argv,
        (envoy.program(), "-c", str(folder / "envoy.json"), "--disable-hot-restart", "--log-level", "error"),
    ]
    processes = [subprocess.Popen(argv) for argv in commands]
    try:
        wait_for(redirector)
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        for one in processes:
            one.kill()
            one.wait()


def test_without_a_picker_no_request_reaches_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envoy, "_MAX_REDIRECTS", 3)
    with golden() as server:
        replica = server.url.removeprefix("http://")
        with gateway(tmp_path, replica) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
            for headers in ({}, {envoy.DESTINATION: replica}, {envoy.ORIGINAL_PATH: "/v1/completions"}):
                found = http.post("/v1/completions", json=BODY, headers=headers)
                assert found.status_code == 503, found.text
                assert "location" not in found.headers and "picker" in found.json()["error"]["message"]
                assert http.post("/unavailable", json=BODY, headers=headers).status_code == 503
                assert http.get("/health", headers=headers).status_code == 503
    assert not server.requests()
