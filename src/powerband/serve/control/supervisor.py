"""The supervisor: starts a fleet's replicas, picker and Envoy, restarts them when they die, and scales the replicas.

    python -m powerband.serve.control.supervisor FOLDER STORE_FD

It reads `spec.json` in the folder (the desired state) and writes `status.json` (the actual state). It sends the picker
the list of endpoints over `control.sock`, and accepts rollout commands on `supervisor.sock`. If it dies, the processes
that it started live on, and the next supervisor takes them over from `powerband serve`, which keeps their sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import resource
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx

from powerband.core.engine import Command
from powerband.errors import PowerbandError
from powerband.runtime import ray_cluster
from powerband.runtime.descriptor_store import StoredDescriptors, StoredProcess
from powerband.serve import envoy, relay
from powerband.serve.autoscaling.autoscaler import Autoscaler
from powerband.serve.autoscaling.snapshot import FleetSnapshot
from powerband.serve.control.local_replica import StoredReplica
from powerband.serve.control.picker_link import PickerLink
from powerband.serve.control.replica_slot import ReplicaSlot
from powerband.serve.control.respawn import respawn
from powerband.serve.control.rollouts import Rollouts
from powerband.serve.spec import FleetSpec, ModelSpec
from powerband.store import runs

_TICK_S, _ENVOY_RELOAD_TIMEOUT_S = 0.25, 5.0
_DRAIN_TIMEOUT_S, _GAUGES_INTERVAL_S = 600.0, 2.0
_ENDPOINTS_INTERVAL_S, _RETRY_WRITE_S = 0.5, 1.0
_ADOPTION_TIMEOUT_S = 2.0
_MIN_OPEN_FILES = 65_536
_NO_ENGINE_PORT = 0
_PICKERS = ("picker", "picker-standby")  # the first to hold the lock serves


class Supervisor:
    """Runs one fleet until it is stopped."""

    def __init__(self, folder: Path, store: StoredDescriptors) -> None:
        self.folder, self.store = folder, store
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
        self.rollouts = Rollouts(self)
        self.freed_at = 0.0  # when a retired replica freed its devices

    async def run(self) -> None:
        """Serve until `stopping` is set; then finish the running requests, and stop everything."""
        if self.spec.cluster:
            await asyncio.to_thread(ray_cluster.connect, self.spec.cluster)
        stored = self.store.all()
        await self._adopt(stored)
        self._write_configuration()
        for name, model_spec in self.spec.models.items():
            in_use, _ = self._slots_of(name)
            for _ in range((model_spec.replicas if in_use else model_spec.first_replicas) - len(in_use)):
                self.add(name, model_spec)
            in_use, _ = self._slots_of(name)
            self._reconcile(name, max(model_spec.replicas, len(in_use) if model_spec.scales else 0))
        helpers = [
            *(asyncio.create_task(self._respawn(name, self._picker_command(), stored)) for name in _PICKERS),
            asyncio.create_task(self.picker.run()),
            asyncio.create_task(self._respawn("redirector", self._redirector_command(), stored)),
            asyncio.create_task(self._respawn("envoy", self._envoy_command(), stored)),
            asyncio.create_task(self._publish_changes()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self.rollouts.serve()),
            asyncio.create_task(self._send_gauges()),
        ]
        stopped = asyncio.create_task(self.stopping.wait())
        done, _ = await asyncio.wait([*helpers, stopped], return_when=asyncio.FIRST_COMPLETED)
        for one in done - {stopped}:
            one.result()  # a helper never returns: raise its exception
        await asyncio.gather(*(self.retire(slot) for slot in list(self.slots.values())))
        for one in helpers:
            one.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)

    async def _adopt(self, stored: dict[str, StoredProcess]) -> None:
        """Take over the replicas of an earlier supervisor that run the same deployments; end the others."""
        for key in [key for key in stored if key.endswith("/engine")]:
            name, (record, _) = key.removesuffix("/engine"), stored[key]
            pool = record["model"]
            model_spec = self.spec.models.get(pool)
            if model_spec and f"{name}/relay" in stored and record["data"] == _deployment_data(model_spec):
                self.add(pool, model_spec, name=name, stored=StoredReplica(stored[key], stored[f"{name}/relay"]))
                self._last_numbers[pool] = max(self._last_numbers[pool], int(name.rpartition("-")[2]))
        for key, (_, control) in stored.items():
            if "/" in key and key.rpartition("/")[0] not in self.slots:
                self.store.drop(key)
                os.close(control)
        until = time.monotonic() + _ADOPTION_TIMEOUT_S  # an engine that died meanwhile is started again
        while any(not one.address for one in self.slots.values()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._reachable = {one.address for one in self.slots.values() if one.address}

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
        runs.write_atomic(self.folder / "envoy.json", json.dumps(settings, indent=1), mode=0o600)
        self._write_endpoints(self._reachable)

    def _write_endpoints(self, addresses: set[str]) -> None:
        self._endpoints_version = secrets.token_hex(8)
        redirector = f"127.0.0.1:{self.spec.redirector_port}"
        content = envoy.endpoints(addresses, redirector=redirector, version=self._endpoints_version)
        runs.write_atomic(self.folder / "endpoints" / "replicas.json", content)

    def set_model(self, model_spec: ModelSpec) -> None:
        """Make a spec that of its model, also for the next supervisor."""
        self.spec = self.spec.with_model(model_spec)
        self.spec.write(self.folder)
        if model_spec.name in self._autoscalers:
            self._autoscalers[model_spec.name].policy = model_spec.scaling_policy()

    def add(
        self,
        pool: str,
        model_spec: ModelSpec,
        *,
        warm: bool = False,
        name: str = "",
        stored: StoredReplica | None = None,
    ) -> None:
        """Add a replica to a model's pool, or one that an earlier supervisor stored."""
        self._last_numbers[pool] += not stored
        slot = ReplicaSlot(
            name or f"{pool}-{self._last_numbers[pool]}",
            pool,
            model_spec,
            self.folder,
            on_ray=bool(self.spec.cluster),
            secret=self.spec.relay_secret,
            on_change=self.changed.set,
            store=self.store,
            stored=stored,
        )
        slot.warm = warm
        self.slots[slot.name] = slot
        self.spawn(slot.run())

    def spawn(self, work: Awaitable[None]) -> None:
        """Run work in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def retire(self, slot: ReplicaSlot) -> None:
        """Drain a replica and stop it: no new requests, wait for the running ones, stop."""
        slot.draining = True
        self.changed.set()
        until = time.monotonic() + _DRAIN_TIMEOUT_S
        await asyncio.sleep(2 * _TICK_S)
        while self.running_requests(slot) and time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
        await slot.stop()
        self.slots.pop(slot.name, None)
        self.freed_at = time.monotonic()
        for one in self.slots.values():
            one.retry()
        self.changed.set()

    def running_requests(self, slot: ReplicaSlot) -> int:
        """Return the number of a replica's requests by the picker's last report."""
        pool = self.picker.report.get("pools", {}).get(slot.pool, {})
        return int(pool.get("running", {}).get(slot.name, 0)) if slot.replica else 0

    async def _publish_changes(self) -> None:
        """Send every change of the replicas to the picker, and those of their addresses to Envoy.

        Envoy learns new addresses before the picker and forgets old ones after it, so the picker only ever names
        addresses that Envoy can reach. Envoy gets all changes of a time together: it reads the whole file each time.
        """
        written_at = -math.inf
        while True:
            await self.changed.wait()
            self.changed.clear()
            self._push_state(self._reachable)
            wanted = {slot.address for slot in self.slots.values() if slot.address}
            if wanted == self._reachable:
                continue
            if (wait_s := written_at + _ENDPOINTS_INTERVAL_S - time.monotonic()) > 0:
                asyncio.get_running_loop().call_later(wait_s, self.changed.set)
                continue
            written_at = time.monotonic()
            try:
                self._write_endpoints(wanted)
                if wanted - self._reachable:
                    await self._wait_reachable()
                self._reachable = wanted
                self._push_state(wanted)
            except OSError as error:  # Envoy keeps the endpoints that it has; new ones wait for the disk
                print(f"warning: cannot write the endpoints for Envoy: {error}", file=sys.stderr, flush=True)
                asyncio.get_running_loop().call_later(_RETRY_WRITE_S, self.changed.set)

    async def _wait_reachable(self) -> None:
        """Wait until Envoy has loaded the endpoints file."""
        until, url = time.monotonic() + _ENVOY_RELOAD_TIMEOUT_S, f"http://127.0.0.1:{self.spec.admin_port}/stats"
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    statistic = await http.get(url, params={"filter": f"^{envoy.ENDPOINTS_VERSION}$"}, timeout=1)
                    if self._endpoints_version in statistic.text:
                        return
                await asyncio.sleep(0.02)

    def _on_picker_connected(self) -> None:
        self._push_state(self._reachable)

    def _push_state(self, reachable: set[str]) -> None:
        """Send the picker the models, their endpoints with `reachable` addresses, and the canary weights."""
        endpoints: dict[str, list[dict[str, Any]]] = {name: [] for name in self.spec.models}
        for slot in self.slots.values():
            if slot.address in reachable:
                endpoints[slot.pool].append(
                    {
                        "name": slot.name,
                        "address": slot.address,
                        "max_in_flight": slot.model_spec.in_flight,
                        "ready": not (slot.draining or slot.warm or slot.hung),
                        "recipe": slot.model_spec.recipe,
                        "canary": self.rollouts.is_canary(slot),
                    }
                )
        state = {
            "models": {name: dataclasses.asdict(model_spec) for name, model_spec in self.spec.models.items()},
            "endpoints": endpoints,
            "canary_weights": self.rollouts.weights,
        }
        self.picker.send(state)

    async def _respawn(self, name: str, command: Command, stored: dict[str, StoredProcess]) -> None:
        log = self.folder / f"{name}.log"
        await respawn(command, log=log, max_backoff_s=2.0, store=self.store, stored=stored.get(name))

    def _picker_command(self) -> Command:
        return Command(argv=(sys.executable, "-m", "powerband.serve.router.picker", str(self.folder)))

    def _redirector_command(self) -> Command:
        """Return a relay of no engine: it redirects each request, so that Envoy asks the picker again."""
        return relay.command("127.0.0.1", self.spec.redirector_port, _NO_ENGINE_PORT)

    def _envoy_command(self) -> Command:
        options = ("--disable-hot-restart", "--concurrency", str(self.spec.threads), "--log-level", "warning")
        return Command(argv=(envoy.program(), "-c", str(self.folder / "envoy.json"), *options))

    async def _send_gauges(self) -> None:
        """Send the state and the engines' metrics of all replicas to the picker, which exports them."""
        while True:
            in_use = [slot.pool for slot in self.slots.values() if not slot.warm]
            wanted = {name: in_use.count(name) for name in self.spec.models}
            replicas = [slot.status() for slot in self.slots.values()]
            self.picker.send({"replicas": replicas, "wanted": wanted, "scaling": self._scaling()})
            await asyncio.sleep(_GAUGES_INTERVAL_S)

    async def _tick(self) -> None:
        """Periodically scale, make the picker reload a changed tenants file, and write `status.json`."""
        tenants_changed_at = 0.0  # the file may have changed while no supervisor ran
        while True:
            for name, model_spec in self.spec.models.items():
                if self.stopping.is_set():
                    break
                if new := self.rollouts.new_spec(name):
                    self.rollouts.make_room(name, new)
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
            arrived=pool["arrived"] + pool["turned_away"],
            rejected=pool["turned_away"] + pool["expired"],
            late=pool["late"],
            at_metrics_s=self.picker.reported_at_s,
        )
        before = autoscaler.decision
        decision = autoscaler.decide(snapshot)
        if before is None or (before.replicas, before.trusted) != (decision.replicas, decision.trusted):
            print(f"{name}: {decision.reason}", file=sys.stderr, flush=True)
        return decision.replicas

    def _scaling(self) -> dict[str, Any]:
        """Return the last decision of each autoscaler, by model."""
        decisions = {name: one.decision for name, one in self._autoscalers.items()}
        return {name: dataclasses.asdict(one) for name, one in decisions.items() if one}

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
            self.add(name, model_spec)
        max_replicas = model_spec.max_replicas or desired + model_spec.warm
        missing_warm = min(model_spec.warm, max(0, max_replicas - desired)) - len(warm)
        least_busy = sorted(in_use, key=lambda one: (one.address is not None, self.running_requests(one)))
        for slot in least_busy[: max(0, len(in_use) - desired)]:
            if missing_warm > 0:
                slot.warm, missing_warm = True, missing_warm - 1
                self.changed.set()
            else:
                self.spawn(self.retire(slot))
        for _ in range(missing_warm):
            self.add(name, model_spec, warm=True)
        for slot in warm[: max(0, -missing_warm)]:
            self.spawn(self.retire(slot))

    def status(self) -> dict[str, Any]:
        """Return the content of `status.json`."""
        return {
            "url": self.spec.url,
            "pid": os.getpid(),
            "at": time.time(),
            "picker": self.picker.connected,
            "replicas": [slot.status() for slot in self.slots.values()],
            "scaling": self._scaling(),
            **self.picker.report,
            "problems": [*filter(None, [self.problem]), *self.picker.report.get("problems", ())],
        }


def _deployment_data(model_spec: ModelSpec) -> dict[str, Any]:
    """Return the deployment of a model as a replica's record has it, after JSON."""
    data: dict[str, Any] = json.loads(json.dumps(model_spec.deployment().to_data(units=True)))
    return data


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


async def _main(folder: Path, store: StoredDescriptors) -> None:
    _raise_open_files()
    supervisor = Supervisor(folder, store)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stopping.set)
    try:
        await supervisor.run()
    except Exception as error:  # the next supervisor takes the engines over: they must not end with this one
        if isinstance(error, PowerbandError):
            print(f"{error.message}\nhint: {error.hint}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), StoredDescriptors(socket.socket(fileno=int(sys.argv[2])))))
