"""Fleets of golden servers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from powerband import serve
from powerband.serve import Fleet

CHAT = {"model": "golden", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5}


def write(folder: Path, *, models: dict[str, dict[str, Any]] | None = None, **knobs: Any) -> Path:
    """Write a fleet of golden servers; `models` says how each is served."""
    for name in models or {"golden": {}}:
        deployment = {"powerband": "deployment/1", "name": name, "variant": {"source": name}, "engine": "fake"}
        (folder / f"{name}.json").write_text(json.dumps({**deployment, "config": knobs}))
    served = {
        name: {"recipe": f"{name}.json", **more} for name, more in (models or {"golden": {"replicas": 2}}).items()
    }
    path = folder / "fleet.json"
    path.write_text(json.dumps({"powerband": "fleet/1", "models": served}))
    return path


@contextlib.asynccontextmanager
async def running(
    path: Path,
    *,
    tenants: str = "",
    capture: bool = False,
    slo_ttft_s: float | None = None,
    tls: tuple[str, str] | None = None,
    ready_s: float = 30,
) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """Run a fleet until it is ready, and yield it with a client."""
    parts, _ = serve.resolve(path)
    if slo_ttft_s is not None:  # as of a recipe
        parts = {name: dataclasses.replace(one, ttft_s=slo_ttft_s) for name, one in parts.items()}
    folder = path.parent / "run"
    folder.mkdir()
    async with serve.fleet(parts, tenants=tenants, folder=folder, capture=capture, tls=tls) as fleet:
        await fleet.wait_until_ready(ready_s)
        limits = httpx.Limits(max_connections=None)
        trusted = ssl.create_default_context(cafile=tls[0]) if tls else False
        async with httpx.AsyncClient(
            base_url=fleet.url, trust_env=False, timeout=30, limits=limits, verify=trusted
        ) as http:
            yield fleet, http


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """Write a self-signed certificate for 127.0.0.1; return its path and its key's."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / "cert.pem", folder / "key.pem"
    new = [one.with_suffix(".new") for one in (cert, key)]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run(
        [openssl, "req", "-x509", "-nodes", *kind, *subject, "-out", str(new[0]), "-keyout", str(new[1])],
        check=True,
        capture_output=True,
    )
    new[1].rename(key)
    new[0].rename(cert)  # last: Envoy reloads both when a file appears
    return str(cert), str(key)


def processes(fleet: Fleet) -> list[psutil.Process]:
    """Return every process of a fleet, by the folder that its command line or its keeper's names."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(fleet.folder) in " ".join(one.cmdline()):
                found += [one, *one.children(recursive=True)]
    return list({one.pid: one for one in found}.values())


def helper(fleet: Fleet, name: str) -> psutil.Process:
    """Return the process of the active picker, of Envoy or of the supervisor."""
    if "picker" in name:
        return psutil.Process(fleet.status()["picker_pid"])
    for one in processes(fleet):
        with contextlib.suppress(psutil.Error):
            line = one.cmdline()
            if "keeper.py" not in " ".join(line[:5]) and any(name in part for part in line[:4]):
                return one
    raise LookupError(name)


async def events(http: httpx.AsyncClient, **more: Any) -> list[dict[str, Any] | str]:
    """Ask for a stream and return its events; it must come to an orderly end."""
    found: list[dict[str, Any] | str] = []
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, **more}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
    return found
