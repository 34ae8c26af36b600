"""A real Prometheus for the proofs: the one on PATH, or Debian's package, unpacked into the cache."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from powerband.runtime import installations, ports


def programs() -> tuple[str, str]:
    """Return where prometheus and promtool are."""
    if (one := shutil.which("prometheus")) and (other := shutil.which("promtool")):
        return one, other
    home = installations.cache_root() / "tools" / "prometheus"
    if not (home / "usr" / "bin" / "promtool").exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "prometheus"], cwd=home, check=True, capture_output=True)
        package = next(home.glob("prometheus_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(package), str(home)], check=True)
    return str(home / "usr" / "bin" / "prometheus"), str(home / "usr" / "bin" / "promtool")


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query that have a value."""
        answer = await self.http.get("/api/v1/query", params={"query": expression})
        found = answer.raise_for_status().json()["data"]["result"]
        return [one for one in found if one["value"][1] not in ("NaN", "+Inf", "-Inf")]

    async def number(self, expression: str) -> float:
        """Return the value of a query that has one."""
        (one,) = await self.query(expression)
        return float(one["value"][1])

    async def firing(self) -> set[str]:
        """Return the alerts that wake somebody."""
        answer = await self.http.get("/api/v1/alerts")
        return {one["labels"]["alertname"] for one in answer.json()["data"]["alerts"] if one["state"] == "firing"}


@contextlib.asynccontextmanager
async def running(folder: Path, target: str, rules: dict[str, str]) -> AsyncIterator[Prometheus]:
    """Run one that scrapes a fleet every other second, under these rules."""
    program, promtool = programs()
    for name, text in rules.items():
        (folder / name).write_text(text)
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(folder / name) for name in rules],
        "scrape_configs": [{"job_name": "fleet", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    subprocess.run([promtool, "check", "config", str(folder / "prometheus.yml")], check=True, capture_output=True)
    with ports.reserve("127.0.0.1") as port:
        argv = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port.number}", "--log.level=warn"]  # fmt: skip
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    own = Prometheus(f"http://127.0.0.1:{port.number}")
    try:
        for _ in range(100):
            with contextlib.suppress(httpx.HTTPError):
                if (await own.http.get("/-/ready")).status_code == 200:
                    break
            await asyncio.sleep(0.2)
        yield own
    finally:
        await own.http.aclose()
        process.terminate()
        process.wait()
