"""The supervisor: keeps a fleet's replicas, its picker and its Envoy alive, and tells each of the others.

    python -m powerband.serve.control.supervisor FOLDER

Everything that it starts dies with it. The folder holds `order.json`, and says in `status.json` how things are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from powerband.core.engine import Command
from powerband.errors import PowerbandError
from powerband.runtime import ray_cluster
from powerband.serve import envoy
from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot
from powerband.serve.control.replica_slot import ReplicaSlot
from powerband.serve.control.respawn import respawn
from powerband.serve.spec import FleetSpec, ModelSpec
from powerband.store import runs

_TICK_S, _PATIENCE_S = 0.25, 5.0
_DRAIN_S, _GAUGES_S = 600.0, 2.0


class Supervisor:
    """A fleet, from its first replica to its last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = FleetSpec.read(folder)
        self.seats: dict[str, ReplicaSlot] = {}
        self.summary: dict[str, Any] = {}
        self.stopping = asyncio.Event()
        self.changed = asyncio.Event()
        self._picker: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = dict.fromkeys(self.order.parts, 0)
        self._scalers = {name: Autoscaler(part.policy()) for name, part in self.order.parts.items() if part.scales}
        self._reachable: set[str] = set()
        self._on_trial: dict[str, tuple[ModelSpec, float]] = {}  # recipes beside the ones in use, and their share

    async def run(self) -> None:
        """Serve until told to stop; then let every answer come to its end."""
        if self.order.cluster:
            await asyncio.to_thread(ray_cluster.connect, self.order.cluster)
        self._write_configuration()
        for name, part in self.order.parts.items():
            for _ in range(part.replicas):
                self._add(name, part)
            self._balance(name, part.replicas)
        helpers = [
            asyncio.create_task(self._keep("picker", self._picker_command(), self._talk)),
            asyncio.create_task(self._keep("envoy", self._envoy_command())),
            asyncio.create_task(self._publish()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._hear()),
            asyncio.create_task(self._read_gauges()),
        ]
        stopped = asyncio.create_task(self.stopping.wait())
        done, _ = await asyncio.wait([*helpers, stopped], return_when=asyncio.FIRST_COMPLETED)
        for one in done - {stopped}:
            one.result()  # a fault of ours
        await asyncio.gather(*(self._retire(seat) for seat in list(self.seats.values())))
        for one in helpers:
            one.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)

    def _write_configuration(self) -> None:
        settings = envoy.bootstrap(
            host=self.order.host,
            port=self.order.port,
            admin_port=self.order.admin_port,
            picker=self.folder / "picker.sock",
            endpoints=self.folder / "endpoints" / "replicas.json",
        )
        (self.folder / "envoy.json").write_text(json.dumps(settings, indent=1))
        self._write_endpoints(set())

    def _write_endpoints(self, addresses: set[str]) -> None:
        runs.write_atomic(self.folder / "endpoints" / "replicas.json", envoy.endpoints(addresses))

    def _add(self, name: str, part: ModelSpec, *, warm: bool = False) -> None:
        self._numbers[name] += 1
        number, afar = self._numbers[name], bool(self.order.cluster)
        seat = ReplicaSlot(f"{name}-{number}", name, part, self.folder, afar=afar, on_change=self.changed.set)
        seat.warm = warm
        self.seats[seat.name] = seat
        self._spawn(seat.run())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retire(self, seat: ReplicaSlot) -> None:
        """Send a replica nothing more, wait for what it is answering, and stop it."""
        seat.draining = True
        self.changed.set()
        until = time.monotonic() + _DRAIN_S
        await asyncio.sleep(2 * _TICK_S)
        while self._running(seat) and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
        await seat.stop()
        self.seats.pop(seat.name, None)
        self.changed.set()

    def _running(self, seat: ReplicaSlot) -> int:
        pool = self.summary.get("pools", {}).get(seat.pool, {})
        return int(pool.get("running", {}).get(seat.name, 0)) if seat.replica else 0

    async def _publish(self) -> None:
        """Tell Envoy and the picker of every change; the picker sends nobody where Envoy does not know the way."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            there = {seat.address for seat in self.seats.values() if seat.address}
            if there - self._reachable:
                self._write_endpoints(there | self._reachable)
                await self._until_reachable(there)
            self._tell()
            if self._reachable - there:
                self._write_endpoints(there)
            self._reachable = there

    async def _until_reachable(self, addresses: set[str]) -> None:
        """Wait until Envoy has read the file."""
        until = time.monotonic() + _PATIENCE_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    known = (await http.get(f"http://127.0.0.1:{self.order.admin_port}/clusters", timeout=1)).text
                    if all(f"replicas::{one}::" in known for one in addresses):
                        return
                await asyncio.sleep(0.02)

    def _tell(self) -> None:
        if self._picker is None:
            return
        backends: dict[str, list[dict[str, Any]]] = {name: [] for name in self.order.parts}
        for seat in self.seats.values():
            if seat.address:
                backends[seat.pool].append(
                    {
                        "name": seat.name,
                        "address": seat.address,
                        "most": seat.part.in_flight,
                        "ready": not seat.draining and not seat.warm,
                        "recipe": seat.part.recipe,
                        "canary": seat.pool in self._on_trial and seat.part is self._on_trial[seat.pool][0],
                    }
                )
        told = {
            "parts": {name: dataclasses.asdict(part) for name, part in self.order.parts.items()},
            "backends": backends,
            "shares": {name: share for name, (_, share) in self._on_trial.items()},
        }
        self._picker.write(json.dumps(told).encode() + b"\n")

    async def _keep(self, name: str, command: Command, use: Callable[[], Awaitable[None]] | None = None) -> None:
        await respawn(command, log=self.folder / f"{name}.log", longest_pause_s=2.0, use=use)

    def _picker_command(self) -> Command:
        return Command(argv=(sys.executable, "-m", "powerband.serve.router.picker", str(self.folder)))

    def _envoy_command(self) -> Command:
        options = ("--disable-hot-restart", "--concurrency", str(self.order.threads), "--log-level", "warning")
        return Command(argv=(envoy.program(), "-c", str(self.folder / "envoy.json"), *options))

    async def _talk(self) -> None:
        """Hear from the picker how things are, as long as it lives."""
        while True:
            try:
                reader, self._picker = await asyncio.open_unix_connection(self.folder / "control.sock", limit=2**24)
                break
            except OSError:
                await asyncio.sleep(0.02)
        self.changed.set()
        self._tell()
        try:
            while line := await reader.readline():
                self.summary = json.loads(line)
        finally:
            self._picker = None

    async def _read_gauges(self) -> None:
        """Ask the engines what they count, and pass it on to the picker, which shows it."""
        while True:
            await asyncio.gather(*(seat.read_gauges() for seat in list(self.seats.values())))
            if self._picker:
                used = [seat.pool for seat in self.seats.values() if not seat.warm]
                wanted = {name: used.count(name) for name in self.order.parts}
                told = {"replicas": [seat.status() for seat in self.seats.values()], "wanted": wanted}
                self._picker.write(json.dumps(told).encode() + b"\n")
            await asyncio.sleep(_GAUGES_S)

    async def _hear(self) -> None:
        """Take orders about recipes, one on each connection."""

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                told = json.loads(await reader.readline())
                try:
                    answer = await self._obey(told)
                except PowerbandError as error:
                    answer = {"error": error.message, "hint": error.hint}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            finally:
                writer.close()

        path = self.folder / "supervisor.sock"
        path.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(take, path) as server:
            await server.serve_forever()

    async def _obey(self, told: dict[str, Any]) -> dict[str, Any]:
        """Put a recipe on trial, put it in the place of the old one, or give it up."""
        name = told["model"]
        if told["do"] == "try":
            part = ModelSpec.of(told["part"])
            self._on_trial[name] = (part, told["share"])
            for _ in range(told["replicas"]):
                self._add(name, part)
            return {"tried": part.recipe}
        if told["do"] == "share":
            self._on_trial[name] = (self._on_trial[name][0], told["share"])
            self.changed.set()
            return {"share": told["share"]}
        part, _ = self._on_trial.pop(name)
        others = [
            one for one in self.seats.values() if one.pool == name and (one.part is part) != (told["do"] == "promote")
        ]
        if told["do"] == "promote":
            fresh = [one for one in self.seats.values() if one.pool == name and one.part is part]
            for _ in range(max(0, part.replicas - len(fresh))):
                self._add(name, part)
            while not all(one.address for one in self.seats.values() if one.part is part):
                await asyncio.sleep(_TICK_S)
            self.order = self.order.with_part(part)
            self.order.write(self.folder)
            if name in self._scalers:
                self._scalers[name].policy = part.policy()
        await asyncio.gather(*(self._retire(one) for one in others))
        return {"serving": self.order.parts[name].recipe}

    async def _tick(self) -> None:
        """Scale, reload keys, and say how things are."""
        keys = _changed_at(self.order.tenants)
        while True:
            for name, part in self.order.parts.items():
                if name not in self._on_trial and not self.stopping.is_set():
                    self._balance(name, self._wanted(name) if part.scales else part.replicas)
            if (now := _changed_at(self.order.tenants)) != keys and self._picker:
                keys = now
                self._picker.write(json.dumps({"tenants": self.order.tenants}).encode() + b"\n")
            runs.write_atomic(self.folder / "status.json", json.dumps(self.status()))
            await asyncio.sleep(_TICK_S)

    def _wanted(self, name: str) -> int:
        """Return how many replicas should be in use."""
        scaler, pool = self._scalers[name], self.summary.get("pools", {}).get(name)
        used, warm = self._own(name)
        if pool is None:
            return len(used)
        if any(one.address for one in warm):
            scaler.policy = dataclasses.replace(scaler.policy, start_s=_TICK_S)
        elif starts := [one.start_s for one in used if one.start_s]:
            scaler.policy = dataclasses.replace(scaler.policy, start_s=max(starts))  # as it was measured here
        seen = FleetSnapshot(
            at_s=time.monotonic(),
            ready=sum(one.address is not None for one in used),
            starting=sum(one.address is None for one in used),
            waiting=pool["depth"],
            running=sum(pool["running"].values()),
            arrived=pool["arrived"],
        )
        return scaler.wanted(seen)

    def _own(self, name: str) -> tuple[list[ReplicaSlot], list[ReplicaSlot]]:
        """Return the seats of a model's recipe: those in use, and the warm ones."""
        own = [one for one in self.seats.values() if one.part is self.order.parts[name] and not one.draining]
        return [one for one in own if not one.warm], [one for one in own if one.warm]

    def _balance(self, name: str, wanted: int) -> None:
        """Have so many replicas in use, and the warm ones beside them; one of these takes the place of a dead one."""
        part = self.order.parts[name]
        used, warm = self._own(name)
        missing = max(0, wanted - sum(one.address is not None for one in used))
        for seat in [one for one in warm if one.address][:missing]:
            seat.warm = False
            self.changed.set()
        used, warm = self._own(name)
        for _ in range(wanted - len(used)):
            self._add(name, part)
        room = min(part.warm, max(0, (part.max_replicas or wanted + part.warm) - wanted)) - len(warm)
        idlest = sorted(used, key=lambda one: (one.address is not None, self._running(one)))
        for seat in idlest[: max(0, len(used) - wanted)]:
            if room > 0:
                seat.warm, room = True, room - 1
                self.changed.set()
            else:
                self._spawn(self._retire(seat))
        for _ in range(room):
            self._add(name, part, warm=True)
        for seat in warm[: max(0, -room)]:
            self._spawn(self._retire(seat))

    def status(self) -> dict[str, Any]:
        """Return how things are."""
        return {
            "url": f"http://{self.order.host}:{self.order.port}",
            "pid": os.getpid(),
            "at": time.time(),
            "picker": self._picker is not None,
            "replicas": [seat.status() for seat in self.seats.values()],
            **self.summary,
        }


def _changed_at(path: str) -> float:
    try:
        return Path(path).stat().st_mtime if path else 0.0
    except OSError:
        return 0.0


async def _main(folder: Path) -> None:
    supervisor = Supervisor(folder)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stopping.set)
    await supervisor.run()


if __name__ == "__main__":
    try:
        asyncio.run(_main(Path(sys.argv[1])))
    except PowerbandError as error:
        sys.exit(f"{error.message}\nhint: {error.hint}")
