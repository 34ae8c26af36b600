"""The stage `serve`: run recipes as a fleet of replicas behind one OpenAI-compatible address.

Crashed processes restart automatically with exponential back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from powerband.errors import EngineFailed
from powerband.runtime import ports
from powerband.serve import envoy, relay
from powerband.serve.outer import run_supervisor
from powerband.serve.spec import FleetSpec, ModelSpec, check_certificate, placed, resolve
from powerband.store import runs

__all__ = ["Fleet", "FleetSpec", "ModelSpec", "check_certificate", "fleet", "resolve"]


class Fleet:
    """A running fleet: its spec, folder, address and status."""

    def __init__(self, spec: FleetSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.url = spec.url

    def status(self) -> dict[str, Any]:
        """Return the supervisor's latest status; empty before the first one."""
        try:
            status: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every requested replica is ready and known to the picker; raise EngineFailed otherwise.

        By default as long as the slowest replica may take to start.
        """
        timeout_s = timeout_s or max(model.start_timeout_s for model in self.spec.models.values())
        wanted = sum(model.replicas for model in self.spec.models.values())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            replicas = status.get("replicas", [])
            ready = [one for one in replicas if one["state"] == "ready"]
            routable = sum(len(pool["running"]) for pool in status.get("pools", {}).values())
            if len(ready) >= wanted and routable >= wanted:
                return
            if failing := [one for one in replicas if one["problem"] and one["starts"] > 2]:
                raise EngineFailed(
                    f"{failing[0]['name']}: {failing[0]['problem']}",
                    hint=f"read {self.folder / failing[0]['name'] / 'engine.log'}",
                    failure="never_ready",
                )
            await asyncio.sleep(0.05)
        raise EngineFailed(
            f"the fleet was not ready after {timeout_s:.0f} s",
            hint=f"read the logs in {self.folder}",
            failure="never_ready",
        )


@contextlib.asynccontextmanager
async def fleet(
    models: dict[str, ModelSpec],
    *,
    tenants: str = "",
    host: str = "127.0.0.1",
    port: int | None = None,
    folder: Path | None = None,
    cluster: str = "",
    tls: tuple[str, str] | None = None,
    threads: int | None = None,
    capture: bool = False,
    capture_text: bool = False,
) -> AsyncIterator[Fleet]:
    """Run a fleet. The supervisor restarts after a crash; engines, relays, picker and Envoy live on meanwhile.

    `tls` has the paths of a certificate and its key; Envoy uses all cores unless `threads` is given.
    """
    envoy.program()  # report what is missing before anything starts
    relay.extension()
    models, host = models if cluster else placed(models), ports.resolve(host)
    folder = folder or runs.new_run("serve")
    local = "127.0.0.1"
    with ports.reserve(host, port) as public, ports.reserve(local) as admin, ports.reserve(local) as redirector:
        spec = FleetSpec(
            models,
            host,
            public.number,
            admin.number,
            redirector.number,
            tenants,
            cluster=cluster,
            relay_secret=secrets.token_hex(16) if cluster else "",
            threads=threads or len(os.sched_getaffinity(0)),
            tls_cert=tls[0] if tls else "",
            tls_key=tls[1] if tls else "",
            capture=capture or capture_text,
            capture_text=capture_text,
        )
        spec.write(folder)
        running = Fleet(spec, folder)
        supervisor = asyncio.create_task(run_supervisor(folder))
        try:
            yield running
        finally:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
