"""The supervisor: starts a fleet's replicas, picker and Envoy, restarts them when they die, and scales the replicas.

    python -m powerband.serve.control.supervisor FOLDER

It reads `spec.json` in the folder (the desired state) and writes `status.json` (the actual state). It sends the picker
the list of endpoints over `control.sock`, and accepts rollout commands on `supervisor.sock`. All processes that it
starts end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from powerband.core.engine import Command
from powerband.errors import EngineFailed, InputError, PowerbandError
from powerband.runtime import ray_cluster
from powerband.serve import envoy
from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot
from powerband.serve.control.picker_link import PickerLink
from powerband.serve.control.replica_slot import ReplicaSlot
from powerband.serve.control.respawn import respawn
from powerband.serve.spec import FleetSpec, ModelSpec
from powerband.store import runs

_TICK_S, _ENVOY_RELOAD_TIMEOUT_S = 0.25, 5.0
_FREE_AFTER_S = 3.0  # until a driver reports the memory of an ended process as free
_DRAIN_TIMEOUT_S, _GAUGES_INTERVAL_S = 600.0, 2.0
_RETRY_WRITE_S = 1.0
_MIN_OPEN_FILES = 65_536


class Supervisor:
    """Runs one fleet until it is stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = FleetSpec.read(folder)
        self.slots: dict[str, ReplicaSlot] = {}
        self.picker = PickerLink(folder / "control.sock", on_connect=self._on_picker_connected)
        self.problem = ""  # of the disk
        self.stopping = asyncio.Event()
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_numbers = dict.fromkeys(self.spec.models, 0)
        self._autoscalers = {
            name: Autoscaler(model_spec.scaling_policy())
            for name, model_spec in self.spec.models.items()
            if model_spec.scales
        }
        self._reachable: set[str] = set()  # addresses that Envoy knows
        self._canaries: dict[str, tuple[ModelSpec, float]] = {}  # by model: the canary's spec and its weight
        self._freed_at = 0.0  # when a retired replica freed its devices
        self._promoted: dict[str, ModelSpec] = {}  # by model: the spec whose replicas replace all others

    async def run(self) -> None:
        """Serve until `stopping` is set; then finish the running requests, and stop everything."""
        if self.spec.cluster:
            await asyncio.to_thread(ray_cluster.connect, self.spec.cluster)
        self._write_configuration()
        for name, model_spec in self.spec.models.items():
            for _ in range(model_spec.replicas):
                self._add(name, model_spec)
            self._reconcile(name, model_spec.replicas)
        helpers = [
            asyncio.create_task(self._respawn("picker", self._picker_command(), self.picker.run)),
            asyncio.create_task(self._respawn("envoy", self._envoy_command())),
            asyncio.create_task(self._publish_changes()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._serve_control()),
            asyncio.create_task(self._read_gauges()),
        ]
        stopped = asyncio.create_task(self.stopping.wait())
        done, _ = await asyncio.wait([*helpers, stopped], return_when=asyncio.FIRST_COMPLETED)
        for one in done - {stopped}:
            one.result()  # a helper never returns: raise its exception
        await asyncio.gather(*(self._retire(slot) for slot in list(self.slots.values())))
        for one in helpers:
            one.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)

    def _write_configuration(self) -> None:
        settings = envoy.bootstrap(
            host=self.spec.host,
            port=self.spec.port,
            admin_port=self.spec.admin_port,
            picker=self.folder / "picker.sock",
            endpoints=self.folder / "endpoints" / "replicas.json",
            tls=self.folder / "tls.json" if self.spec.tls_cert else None,
            secret=self.spec.relay_secret,
        )
        if self.spec.tls_cert:
            (self.folder / "tls.json").write_text(envoy.certificate(self.spec.tls_cert, self.spec.tls_key))
        (self.folder / "envoy.json").write_text(json.dumps(settings, indent=1))
        self._write_endpoints(set())

    def _write_endpoints(self, addresses: set[str]) -> None:
        runs.write_atomic(self.folder / "endpoints" / "replicas.json", envoy.endpoints(addresses))

    def _add(self, name: str, model_spec: ModelSpec, *, warm: bool = False) -> None:
        self._last_numbers[name] += 1
        slot = ReplicaSlot(
            f"{name}-{self._last_numbers[name]}",
            name,
            model_spec,
            self.folder,
            on_ray=bool(self.spec.cluster),
            secret=self.spec.relay_secret,
            on_change=self.changed.set,
        )
        slot.warm = warm
        self.slots[slot.name] = slot
        self._spawn(slot.run())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retire(self, slot: ReplicaSlot) -> None:
        """Drain a replica and stop it: no new requests, wait for the running ones, stop."""
        slot.draining = True
        self.changed.set()
        until = time.monotonic() + _DRAIN_TIMEOUT_S
        await asyncio.sleep(2 * _TICK_S)
        while self._running(slot) and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
        await slot.stop()
        self.slots.pop(slot.name, None)
        self._freed_at = time.monotonic()
        for one in self.slots.values():
            one.retry()
        self.changed.set()

    def _running(self, slot: ReplicaSlot) -> int:
        pool = self.picker.report.get("pools", {}).get(slot.pool, {})
        return int(pool.get("running", {}).get(slot.name, 0)) if slot.replica else 0

    async def _publish_changes(self) -> None:
        """Send every change of the replicas to Envoy and the picker.

        Envoy learns new addresses before the picker and forgets old ones after it, so the picker only ever names
        addresses that Envoy can reach.
        """
        while True:
            await self.changed.wait()
            self.changed.clear()
            addresses = {slot.address for slot in self.slots.values() if slot.address}
            try:
                if addresses - self._reachable:
                    self._write_endpoints(addresses | self._reachable)
                    await self._wait_reachable(addresses)
                self._push_state()
                if self._reachable - addresses:
                    self._write_endpoints(addresses)
                self._reachable = addresses
            except OSError as error:  # Envoy keeps the endpoints that it has; new ones wait for the disk
                print(f"warning: cannot write the endpoints for Envoy: {error}", file=sys.stderr, flush=True)
                self._push_state(self._reachable)
                asyncio.get_running_loop().call_later(_RETRY_WRITE_S, self.changed.set)

    async def _wait_reachable(self, addresses: set[str]) -> None:
        """Wait until Envoy has loaded the endpoints file."""
        until = time.monotonic() + _ENVOY_RELOAD_TIMEOUT_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    known = (await http.get(f"http://127.0.0.1:{self.spec.admin_port}/clusters", timeout=1)).text
                    if all(f"replicas::{one}::" in known for one in addresses):
                        return
                await asyncio.sleep(0.02)

    def _on_picker_connected(self) -> None:
        self.changed.set()
        self._push_state()

    def _push_state(self, reachable: set[str] | None = None) -> None:
        """Send the picker the models, their endpoints (of `reachable` addresses, if given) and the canary weights."""
        endpoints: dict[str, list[dict[str, Any]]] = {name: [] for name in self.spec.models}
        for slot in self.slots.values():
            if slot.address and (reachable is None or slot.address in reachable):
                endpoints[slot.pool].append(
                    {
                        "name": slot.name,
                        "address": slot.address,
                        "max_in_flight": slot.model_spec.in_flight,
                        "ready": not (slot.draining or slot.warm or slot.hung),
                        "recipe": slot.model_spec.recipe,
                        "canary": slot.pool in self._canaries and slot.model_spec is self._canaries[slot.pool][0],
                    }
                )
        state = {
            "models": {name: dataclasses.asdict(model_spec) for name, model_spec in self.spec.models.items()},
            "endpoints": endpoints,
            "canary_weights": {name: weight for name, (_, weight) in self._canaries.items()},
        }
        self.picker.send(state)

    async def _respawn(
        self, name: str, command: Command, while_running: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        await respawn(command, log=self.folder / f"{name}.log", max_backoff_s=2.0, while_running=while_running)

    def _picker_command(self) -> Command:
        return Command(argv=(sys.executable, "-m", "powerband.serve.router.picker", str(self.folder)))

    def _envoy_command(self) -> Command:
        options = ("--disable-hot-restart", "--concurrency", str(self.spec.threads), "--log-level", "warning")
        return Command(argv=(envoy.program(), "-c", str(self.folder / "envoy.json"), *options))

    async def _read_gauges(self) -> None:
        """Read the engines' metrics and send them to the picker, which exports them."""
        while True:
            await asyncio.gather(*(slot.read_gauges() for slot in list(self.slots.values())))
            in_use = [slot.pool for slot in self.slots.values() if not slot.warm]
            wanted = {name: in_use.count(name) for name in self.spec.models}
            self.picker.send({"replicas": [slot.status() for slot in self.slots.values()], "wanted": wanted})
            await asyncio.sleep(_GAUGES_INTERVAL_S)

    async def _serve_control(self) -> None:
        """Accept rollout commands on `supervisor.sock`; a rollout whose connection ends is rolled back."""

        async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            led: set[str] = set()  # models whose rollouts this connection leads
            try:
                while line := await reader.readline():
                    command = json.loads(line)
                    try:
                        answer = await self._handle_command(command)
                        if command["action"] == "start_canary":
                            led.add(command["model"])
                    except PowerbandError as error:
                        answer = {"error": error.message, "hint": error.hint}
                    writer.write(json.dumps(answer).encode() + b"\n")
                    await writer.drain()
            except OSError:
                pass  # the command was killed
            finally:
                writer.close()
                for name in led & self._canaries.keys():
                    print(f"warning: the rollout of {name} ended early; it is rolled back", file=sys.stderr, flush=True)
                    await self._end_rollout(name)

        path = self.folder / "supervisor.sock"
        path.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(serve_connection, path) as server:
            await server.serve_forever()

    async def _handle_command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Start a canary, set its weight, promote it, or roll it back."""
        name, action = command["model"], command["action"]
        if action == "start_canary":
            if name in self._canaries or name in self._promoted:
                raise InputError(f"a rollout of {name} is running", hint="wait until it ends, or stop its command")
            model_spec = ModelSpec.from_data(command["model_spec"])
            self._canaries[name] = (model_spec, command["canary_weight"])
            for _ in range(command["replicas"]):
                self._add(name, model_spec)
            return {"canary": model_spec.recipe}
        if action == "set_canary_weight":
            self._canaries[name] = (self._canaries[name][0], command["canary_weight"])
            self.changed.set()
            return {"canary_weight": command["canary_weight"]}
        if name not in self._canaries:
            raise InputError(f"no rollout of {name} is running", hint="the supervisor may have been restarted")
        if action == "promote":
            await self._promote(name, self._canaries[name][0], command["timeout_s"])
        await self._end_rollout(name)
        return {"serving": self.spec.models[name].recipe}

    async def _end_rollout(self, name: str) -> None:
        """Retire the replicas that are not of the model's spec."""
        self._canaries.pop(name, None)
        current = self.spec.models[name]
        others = [one for one in self.slots.values() if one.pool == name and one.model_spec is not current]
        await asyncio.gather(*map(self._retire, others))

    async def _promote(self, name: str, model_spec: ModelSpec, timeout_s: float) -> None:
        """Start the other replicas of the canary's spec and make it the model's, or roll it back after the timeout."""
        del self._canaries[name]
        self._promoted[name] = model_spec
        for _ in range(max(0, model_spec.replicas - len(self._slots_with(model_spec)))):
            self._add(name, model_spec)
        until = time.monotonic() + timeout_s
        try:
            while starting := [one for one in self._slots_with(model_spec) if not one.address]:
                if time.monotonic() > until:
                    problem = next((f": {one.problem}" for one in starting if one.problem), "")
                    message = f"{len(starting)} of {model_spec.replicas} replicas did not start in {timeout_s:g} s"
                    self._spawn(self._end_rollout(name))
                    hint = f"the fleet serves {self.spec.models[name].recipe} again"
                    raise EngineFailed(message + problem, hint=hint, failure="never_ready")
                await asyncio.sleep(_TICK_S)
        finally:
            del self._promoted[name]
        self.spec = self.spec.with_model(model_spec)
        self.spec.write(self.folder)
        if name in self._autoscalers:
            self._autoscalers[name].policy = model_spec.scaling_policy()

    def _slots_with(self, model_spec: ModelSpec) -> list[ReplicaSlot]:
        return [one for one in self.slots.values() if one.model_spec is model_spec]

    def _make_room(self, name: str, new: ModelSpec) -> None:
        """Retire one replica of the current spec if a replica of the new spec found no free device.

        One replica at most is not ready because of this; the last one that is ready stays.
        """
        starting = [one for one in self._slots_with(new) if not one.address]
        ready = [one for one in self.slots.values() if one.pool == name and one.address and not one.draining]
        old = [one for one in ready if one.model_spec is not new]
        draining = any(one.pool == name and one.draining for one in self.slots.values())
        draining = draining or time.monotonic() < self._freed_at + _FREE_AFTER_S
        if len(ready) > 1 and old and starting and not draining and all(one.no_room for one in starting):
            self._spawn(self._retire(min(old, key=self._running)))

    async def _tick(self) -> None:
        """Periodically scale, make the picker reload a changed tenants file, and write `status.json`."""
        tenants_changed_at = _changed_at(self.spec.tenants)
        while True:
            for name, model_spec in self.spec.models.items():
                if self.stopping.is_set():
                    break
                new = self._promoted.get(name) or self._canaries.get(name, (None,))[0]
                if new:
                    self._make_room(name, new)
                else:
                    self._reconcile(name, self._desired_replicas(name) if model_spec.scales else model_spec.replicas)
            if (now := _changed_at(self.spec.tenants)) != tenants_changed_at and self.picker.connected:
                tenants_changed_at = now
                self.picker.send({"tenants": self.spec.tenants})
            self._write_status()
            await asyncio.sleep(_TICK_S)

    def _write_status(self) -> None:
        """Write `status.json`; a disk that is full or fails must not end the fleet."""
        try:
            runs.write_atomic(self.folder / "status.json", json.dumps(self.status()))
            self.problem = ""
        except OSError as error:
            if not self.problem:
                print(f"warning: cannot write status.json: {error}; the fleet goes on", file=sys.stderr, flush=True)
            self.problem = f"cannot write status.json: {error.strerror}"

    def _desired_replicas(self, name: str) -> int:
        """Return how many replicas the autoscaler wants in use."""
        autoscaler, pool = self._autoscalers[name], self.picker.report.get("pools", {}).get(name)
        in_use, warm = self._slots_of(name)
        if pool is None:
            return len(in_use)
        if any(one.address for one in warm):
            autoscaler.policy = dataclasses.replace(autoscaler.policy, start_s=_TICK_S)
        elif starts := [one.start_s for one in in_use if one.start_s]:
            autoscaler.policy = dataclasses.replace(autoscaler.policy, start_s=max(starts))  # as measured here
        snapshot = FleetSnapshot(
            at_s=time.monotonic(),
            ready=sum(one.ready for one in in_use),
            starting=sum(not one.ready for one in in_use),
            waiting=pool["depth"],
            running=sum(pool["running"].values()),
            arrived=pool["arrived"],
        )
        return autoscaler.desired_replicas(snapshot)

    def _slots_of(self, name: str) -> tuple[list[ReplicaSlot], list[ReplicaSlot]]:
        """Return the slots of a model's recipe that are not draining: those in use, and the warm ones."""
        slots = [one for one in self.slots.values() if one.model_spec is self.spec.models[name] and not one.draining]
        return [one for one in slots if not one.warm], [one for one in slots if one.warm]

    def _reconcile(self, name: str, desired: int) -> None:
        """Start, activate and retire replicas until `desired` are in use, with the warm ones of the spec on top.

        A ready warm replica replaces one that is missing or not ready.
        """
        model_spec = self.spec.models[name]
        in_use, warm = self._slots_of(name)
        missing = max(0, desired - sum(one.ready for one in in_use))
        for slot in [one for one in warm if one.address][:missing]:
            slot.warm = False
            self.changed.set()
        in_use, warm = self._slots_of(name)
        for _ in range(desired - len(in_use)):
            self._add(name, model_spec)
        max_replicas = model_spec.max_replicas or desired + model_spec.warm
        missing_warm = min(model_spec.warm, max(0, max_replicas - desired)) - len(warm)
        least_busy = sorted(in_use, key=lambda one: (one.address is not None, self._running(one)))
        for slot in least_busy[: max(0, len(in_use) - desired)]:
            if missing_warm > 0:
                slot.warm, missing_warm = True, missing_warm - 1
                self.changed.set()
            else:
                self._spawn(self._retire(slot))
        for _ in range(missing_warm):
            self._add(name, model_spec, warm=True)
        for slot in warm[: max(0, -missing_warm)]:
            self._spawn(self._retire(slot))

    def status(self) -> dict[str, Any]:
        """Return the content of `status.json`."""
        return {
            "url": self.spec.url,
            "pid": os.getpid(),
            "at": time.time(),
            "picker": self.picker.connected,
            "replicas": [slot.status() for slot in self.slots.values()],
            **self.picker.report,
            "problems": [*filter(None, [self.problem]), *self.picker.report.get("problems", ())],
        }


def _changed_at(path: str) -> float:
    try:
        return Path(path).stat().st_mtime if path else 0.0
    except OSError:
        return 0.0


def _raise_open_files() -> None:
    """Raise the limit of open files, which the relays, the picker and Envoy inherit, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _MIN_OPEN_FILES:
        print(
            f"warning: at most {hard} files can be open; a fleet under load needs {_MIN_OPEN_FILES}: raise 'ulimit -n'",
            file=sys.stderr,
            flush=True,
        )


async def _main(folder: Path) -> None:
    _raise_open_files()
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
