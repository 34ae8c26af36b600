"""A replica on another machine: one Ray actor, placed by what it needs, that holds it as this machine would.

Ray restarts nothing here: the supervisor sees an engine, an actor or a node die, and asks for another place.
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
    """The actor: what it holds dies with it."""

    async def take(self, data: dict[str, Any], directory: str) -> dict[str, Any]:
        """Start a replica on this node."""
        self._stack = contextlib.AsyncExitStack()
        host = ray_cluster.library().util.get_node_ip_address()
        found = await self._stack.enter_async_context(local_replica.run_replica(data, Path(directory), host=host))
        self._found = found
        return {"address": found.address, "engine": found.engine, "pid": found.pid}

    async def ended(self) -> None:
        """Return when the replica is gone."""
        await self._found.ended()

    async def gauges(self) -> dict[str, float]:
        """Return what the engine counts itself."""
        return await self._found.gauges()

    async def leave(self) -> None:
        """Stop it."""
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def run_replica(data: dict[str, Any], directory: Path) -> AsyncIterator[local_replica.RunningReplica]:
    """Start a replica wherever the cluster has room, and yield it once it answers."""
    ray = ray_cluster.library()
    gpus = len(data.get("placement", {}).get("gpus") or ())
    actor = ray.remote(ReplicaActor).options(num_cpus=1, num_gpus=gpus, max_restarts=0, max_concurrency=8).remote()
    try:
        try:
            found = await actor.take.remote(data, str(directory))
        except ray.exceptions.RayError as error:
            raise EngineFailed(
                ray_cluster.told(error), hint="look at the nodes with 'ray status'", failure="crashed"
            ) from None

        async def ended() -> None:
            try:
                await actor.ended.remote()
            except ray.exceptions.RayError as error:
                raise EngineFailed(ray_cluster.told(error), hint="", failure="crashed") from None

        async def gauges() -> dict[str, float]:
            counted: dict[str, float] = await actor.gauges.remote()
            return counted

        yield local_replica.RunningReplica(found["address"], found["engine"], found["pid"], ended, gauges)
        with contextlib.suppress(ray.exceptions.RayError):
            await actor.leave.remote()
    finally:
        ray.kill(actor)
