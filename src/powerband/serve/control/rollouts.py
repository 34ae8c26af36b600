"""Rollouts as the supervisor runs them: a canary, its weight, its promotion or its end."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from powerband.errors import EngineFailed, InputError, PowerbandError
from powerband.serve.control.replica_slot import ReplicaSlot
from powerband.serve.spec import ModelSpec

if TYPE_CHECKING:
    from powerband.serve.control.supervisor import Supervisor

_TICK_S = 0.25
_FREE_AFTER_S = 3.0  # until a driver reports the memory of an ended process as free


class Rollouts:
    """The rollouts of a fleet: one for each model at most, each led by a connection to `supervisor.sock`."""

    def __init__(self, fleet: Supervisor) -> None:
        self.fleet = fleet
        self.canaries: dict[str, tuple[ModelSpec, float]] = {}  # by model: the canary's spec and its weight
        self.promoted: dict[str, ModelSpec] = {}  # by model: the spec whose replicas replace all others

    def new_spec(self, name: str) -> ModelSpec | None:
        """Return the spec that is being rolled out for a model."""
        return self.promoted.get(name) or self.canaries.get(name, (None,))[0]

    def is_canary(self, slot: ReplicaSlot) -> bool:
        """Return whether a slot runs a canary."""
        return slot.pool in self.canaries and slot.model_spec is self.canaries[slot.pool][0]

    @property
    def weights(self) -> dict[str, float]:
        """Return the share of the requests that each model's canary gets."""
        return {name: weight for name, (_, weight) in self.canaries.items()}

    async def serve(self) -> None:
        """Accept rollout commands on `supervisor.sock`; a rollout whose connection ends is rolled back."""

        async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            led: set[str] = set()  # models whose rollouts this connection leads
            try:
                while line := await reader.readline():
                    command = json.loads(line)
                    try:
                        answer = await self._handle(command)
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
                for name in led & self.canaries.keys():
                    print(f"warning: the rollout of {name} ended early; it is rolled back", file=sys.stderr, flush=True)
                    await self._end(name)

        path = self.fleet.folder / "supervisor.sock"
        path.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(serve_connection, path) as server:
            await server.serve_forever()

    async def _handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Start a canary, set its weight, promote it, or roll it back."""
        name, action = command["model"], command["action"]
        if action == "start_canary":
            if name in self.canaries or name in self.promoted:
                raise InputError(f"a rollout of {name} is running", hint="wait until it ends, or stop its command")
            model_spec = ModelSpec.from_data(command["model_spec"])
            self.canaries[name] = (model_spec, command["canary_weight"])
            for _ in range(command["replicas"]):
                self.fleet.add(name, model_spec)
            return {"canary": model_spec.recipe}
        if action == "set_canary_weight":
            self.canaries[name] = (self.canaries[name][0], command["canary_weight"])
            self.fleet.changed.set()
            return {"canary_weight": command["canary_weight"]}
        if name not in self.canaries:
            raise InputError(f"no rollout of {name} is running", hint="the supervisor may have been restarted")
        if action == "promote":
            await self._promote(name, self.canaries[name][0], command["timeout_s"])
        await self._end(name)
        return {"serving": self.fleet.spec.models[name].recipe}

    async def _end(self, name: str) -> None:
        """Retire the replicas that are not of the model's spec."""
        self.canaries.pop(name, None)
        current = self.fleet.spec.models[name]
        others = [one for one in self.fleet.slots.values() if one.pool == name and one.model_spec is not current]
        await asyncio.gather(*map(self.fleet.retire, others))

    async def _promote(self, name: str, model_spec: ModelSpec, timeout_s: float) -> None:
        """Start the other replicas of the canary's spec and make it the model's, or roll it back after the timeout."""
        del self.canaries[name]
        self.promoted[name] = model_spec
        for _ in range(max(0, model_spec.replicas - len(self._slots_with(model_spec)))):
            self.fleet.add(name, model_spec)
        until = time.monotonic() + timeout_s
        try:
            while starting := [one for one in self._slots_with(model_spec) if not one.address]:
                if time.monotonic() > until:
                    problem = next((f": {one.problem}" for one in starting if one.problem), "")
                    message = f"{len(starting)} of {model_spec.replicas} replicas did not start in {timeout_s:g} s"
                    self.fleet.spawn(self._end(name))
                    hint = f"the fleet serves {self.fleet.spec.models[name].recipe} again"
                    raise EngineFailed(message + problem, hint=hint, failure="never_ready")
                await asyncio.sleep(_TICK_S)
        finally:
            del self.promoted[name]
        self.fleet.set_model(model_spec)

    def _slots_with(self, model_spec: ModelSpec) -> list[ReplicaSlot]:
        return [one for one in self.fleet.slots.values() if one.model_spec is model_spec]

    def make_room(self, name: str, new: ModelSpec) -> None:
        """Retire one replica of the current spec if a replica of the new spec found no free device.

        One replica at most is not ready because of this; the last one that is ready stays. A start that began before
        the devices of the last one were free proves nothing: on a busy machine it may take long to fail.
        """
        starting = [one for one in self._slots_with(new) if not one.address]
        ready = [one for one in self.fleet.slots.values() if one.pool == name and one.address and not one.draining]
        old = [one for one in ready if one.model_spec is not new]
        draining = any(one.pool == name and one.draining for one in self.fleet.slots.values())
        free_from = self.fleet.freed_at + _FREE_AFTER_S
        no_room = all(one.no_room and one.tried_at >= free_from for one in starting)
        if len(ready) > 1 and old and starting and not draining and no_room:
            self.fleet.spawn(self.fleet.retire(min(old, key=self.fleet.running_requests)))
