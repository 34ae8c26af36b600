"""The stage `serve`: a recipe as a fleet behind one address, that keeps its promise while its parts die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from powerband.core.engine import Command
from powerband.errors import EngineFailed
from powerband.runtime import ports
from powerband.serve import envoy
from powerband.serve.control.respawn import respawn
from powerband.serve.spec import FleetSpec, ModelSpec, resolve
from powerband.store import runs

__all__ = ["Fleet", "FleetSpec", "ModelSpec", "fleet", "resolve"]

_DRAIN_S = 600.0


class Fleet:
    """A running fleet: its address, its folder, and how it is."""

    def __init__(self, order: FleetSpec, folder: Path) -> None:
        self.order, self.folder = order, folder
        self.url = f"http://{order.host}:{order.port}"

    def status(self) -> dict[str, Any]:
        """Return what the supervisor said last."""
        try:
            told: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return told

    async def ready(self, within_s: float) -> None:
        """Return when every replica that was asked for answers; say why where that does not happen."""
        wanted = sum(part.replicas for part in self.order.parts.values())
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            told = self.status()
            replicas = told.get("replicas", [])
            answering = [one for one in replicas if one["state"] == "ready"]
            known = sum(len(pool["running"]) for pool in told.get("pools", {}).values())
            if len(answering) >= wanted and known >= wanted:
                return
            if broken := [one for one in replicas if one["problem"] and one["starts"] > 2]:
                raise EngineFailed(
                    f"{broken[0]['name']}: {broken[0]['problem']}",
                    hint=f"read {self.folder / broken[0]['name'] / 'engine.log'}",
                    failure="never_ready",
                )
            await asyncio.sleep(0.05)
        raise EngineFailed(
            f"the fleet was not ready after {within_s:.0f} s",
            hint=f"read the logs in {self.folder}",
            failure="never_ready",
        )


@contextlib.asynccontextmanager
async def fleet(
    parts: dict[str, ModelSpec],
    *,
    tenants: str = "",
    host: str = "127.0.0.1",
    port: int | None = None,
    folder: Path | None = None,
    cluster: str = "",
    capture: bool = False,
    capture_text: bool = False,
) -> AsyncIterator[Fleet]:
    """Run a fleet. Its supervisor is run again whenever it dies; all that it had started is gone by then."""
    envoy.program()  # refuse before anything starts
    folder = folder or runs.new_run("serve")
    with ports.reserve(host, port) as own, ports.reserve("127.0.0.1") as admin:
        order = FleetSpec(
            parts,
            host,
            own.number,
            admin.number,
            tenants,
            cluster=cluster,
            capture=capture or capture_text,
            capture_text=capture_text,
        )
        order.write(folder)
        running = Fleet(order, folder)
        command = Command(argv=(sys.executable, "-m", "powerband.serve.control.supervisor", str(folder)))
        log = folder / "supervisor.log"
        keeping = asyncio.create_task(respawn(command, log=log, longest_pause_s=5.0, grace_s=_DRAIN_S))
        try:
            yield running
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
