"""Run one replica on a node of a Ray cluster: one actor per replica, scheduled by its resource needs.

Ray restarts nothing here: the supervisor detects that an engine, an actor or a node died, and creates a new actor.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from powerband.errors import EngineFailed
from powerband.runtime import ray_cluster
from powerband.serve.control import local_replica


class ReplicaActor:
    """Ray actor that runs one replica; the replica's processes end with the actor."""

    async def run(self, data: dict[str, Any], directory: str) -> dict[str, Any]:
        """Start a replica on this node, and return its address, engine URL and pid once it is ready."""
        self._stack = contextlib.AsyncExitStack()
        host = ray_cluster.library().util.get_node_ip_address()
        replica = await self._stack.enter_async_context(local_replica.run_replica(data, Path(directory), host=host))
        self._replica = replica
        return {"address": replica.address, "engine_url": replica.engine_url, "pid": replica.pid}

    async def wait_ended(self) -> None:
        """Return when the replica ends."""
        await self._replica.wait_ended()

    async def gauges(self) -> dict[str, float]:
        """Return the engine's own metrics."""
        return await self._replica.gauges()

    async def stop(self) -> None:
        """Stop the replica."""
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def run_replica(data: dict[str, Any], directory: Path) -> AsyncIterator[local_replica.RunningReplica]:
    """Start a replica on a node with enough free resources, and yield it once it is ready."""
    ray = ray_cluster.library()
    gpus = len(data.get("placement", {}).get("gpus") or ())
    actor = ray.remote(ReplicaActor).options(num_cpus=1, num_gpus=gpus, max_restarts=0, max_concurrency=8).remote()
    try:
        try:
            started = await actor.run.remote(data, str(directory))
        except ray.exceptions.RayError as error:
            raise EngineFailed(
                ray_cluster.remote_error_message(error), hint="check the nodes with 'ray status'", failure="crashed"
            ) from None

        async def wait_ended() -> None:
            try:
                await actor.wait_ended.remote()
            except ray.exceptions.RayError as error:
                raise EngineFailed(ray_cluster.remote_error_message(error), hint="", failure="crashed") from None

        async def gauges() -> dict[str, float]:
            values: dict[str, float] = await actor.gauges.remote()
            return values

        yield local_replica.RunningReplica(
            started["address"], started["engine_url"], started["pid"], wait_ended, gauges
        )
        with contextlib.suppress(ray.exceptions.RayError):
            await actor.stop.remote()
    finally:
        ray.kill(actor)
