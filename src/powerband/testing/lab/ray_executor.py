"""The workers of a replica that spans hosts: one Ray actor for each device, as vLLM's Ray executor starts them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.testing.lab.vllm_log import Refused
from powerband.testing.lab.world import LabDevice, LabHost

NODE_RESOURCE = "lab-"  # with the name of the host: a resource that the Ray node of a host has, as `node:IP` elsewhere
_PLACEMENT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Place:
    """The process of an actor, and its device."""

    pid: int
    host: LabHost
    device: LabDevice


class DeviceActor:
    """A process with the one device that Ray gave it."""

    def describe(self) -> tuple[int, str, str]:
        """Return the process id, the folder of the host, and the UUID of the device."""
        host = LabHost.current()
        return os.getpid(), str(host.folder), host.visible()[0].uuid

    def wait(self) -> None:
        """Return never: the call fails when the actor or its node ends."""
        threading.Event().wait()


class RayExecutor:
    """A placement group with one bundle for each device, on as few nodes as possible, and an actor in each."""

    def __init__(self, devices: int) -> None:
        import ray as library
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray: Any = library  # partly without types
        self._ray = ray
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, ignore_reinit_error=True)
        total = ray.cluster_resources().get("GPU", 0)
        if devices > total:
            raise Refused(
                f"The number of required GPUs exceeds the total number of available GPUs in the placement group. "
                f"Required: {devices}, available: {total:.0f}",
                process="EngineCore",
            )
        own = {f"{NODE_RESOURCE}{LabHost.current().name}": 0.001}  # vLLM wants the first device on its own node
        bundles = [{"GPU": 1}] * devices
        self._group = placement_group([{**bundles[0], **own}, *bundles[1:]], strategy="PACK")
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            raise Refused("Cannot provide a placement group in time. See `ray status`.", process="EngineCore")
        actor = ray.remote(DeviceActor)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=0,
                num_gpus=1,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote()
            for number in range(devices)
        ]
        self.places = [_place(*one) for one in ray.get([one.describe.remote() for one in self._actors])]

    def on_loss(self, call: Callable[[int], object]) -> None:
        """Call a function with the number of the first actor that ended, or whose node did."""

        def watch() -> None:
            waiting = [one.wait.remote() for one in self._actors]
            ended, _ = self._ray.wait(waiting, num_returns=1)
            call(waiting.index(ended[0]))

        threading.Thread(target=watch, daemon=True).start()

    def close(self) -> None:
        """End the actors and give the devices back."""
        from ray.util.placement_group import remove_placement_group

        for one in self._actors:
            self._ray.kill(one)
        remove_placement_group(self._group)


def _place(pid: int, folder: str, uuid: str) -> Place:
    host = LabHost(Path(folder))
    return Place(pid, host, next(one for one in host.devices if one.uuid == uuid))
