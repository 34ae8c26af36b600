"""Run one replica on a node of a Ray cluster: one actor per replica, scheduled by its resource needs.

Ray chooses the node and the GPUs: it sets CUDA_VISIBLE_DEVICES of the actor, whose replica then chooses among these. A
deployment that spans nodes gets its GPUs from the engine's own Ray executor, which needs one of them on its own node.

Ray restarts nothing here: the supervisor detects that an engine, an actor or a node died, and creates a new actor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from powerband.errors import EngineFailed
from powerband.runtime import ray_cluster
from powerband.serve.control import local_replica

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class ReplicaActor:
    """Ray actor that runs one replica; the replica's processes end with the actor."""

    async def run(self, data: dict[str, Any], directory: str, over_nodes: bool, secret: str) -> dict[str, Any]:
        """Start a replica on this node, and return its address, engine URL, pid and GPUs once it is ready."""
        ray = ray_cluster.library()
        if over_nodes:  # Ray hides all GPUs from an actor without GPUs
            for name in _VISIBLE:
                os.environ.pop(name, None)
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for the engine's Ray executor
        self._stack = contextlib.AsyncExitStack()
        host = ray.util.get_node_ip_address()
        running = local_replica.run_replica(data, Path(directory), host=host, secret=secret)
        self._replica = replica = await self._stack.enter_async_context(running)
        about = ("address", "engine_url", "pid", "gpus")
        return {name: getattr(replica, name) for name in about}

    async def wait_ended(self) -> None:
        """Return when the replica ends."""
        await self._replica.wait_ended()

    async def probe(self) -> dict[str, float]:
        """Return the engine's metrics when it has answered, however late."""
        return await self._replica.probe()

    async def redirect_waiting(self) -> None:
        """Send the requests without a token to other replicas."""
        self._replica.redirect_waiting()

    async def stop(self) -> None:
        """Stop the replica."""
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def run_replica(
    data: dict[str, Any], directory: Path, *, gpus: int = 0, over_nodes: bool = False, secret: str = ""
) -> AsyncIterator[local_replica.RunningReplica]:
    """Start a replica on a node with enough free resources, and yield it once it is ready."""
    ray = ray_cluster.library()
    if "gpus" in data.get("placement", {}):  # indices of one machine
        data = data | {"placement": {key: value for key, value in data["placement"].items() if key != "gpus"}}
    where = ray_cluster.on_a_gpu_node() if over_nodes else "DEFAULT"
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "max_concurrency": 8, "scheduling_strategy": where}
    actor = ray.remote(ReplicaActor).options(**options).remote()
    try:
        try:
            started = await actor.run.remote(data, str(directory), over_nodes, secret)
        except ray.exceptions.RayError as error:
            raise EngineFailed(
                ray_cluster.remote_error_message(error), hint="check the nodes with 'ray status'", failure="crashed"
            ) from None

        async def wait_ended() -> None:
            try:
                await actor.wait_ended.remote()
            except ray.exceptions.RayError as error:
                raise EngineFailed(ray_cluster.remote_error_message(error), hint="", failure="crashed") from None

        async def probe() -> dict[str, float]:
            values: dict[str, float] = await actor.probe.remote()
            return values

        def redirect_waiting() -> None:
            actor.redirect_waiting.remote()

        yield local_replica.RunningReplica(
            started["address"], started["engine_url"], started["pid"], wait_ended, probe, redirect_waiting,
            started["gpus"],
        )  # fmt: skip
        with contextlib.suppress(ray.exceptions.RayError):
            await actor.stop.remote()
    finally:
        ray.kill(actor)
