"""Endpoints from Kubernetes: the pods of an InferencePool, each of its target ports, ready and not terminating."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from powerband.core.recipe import RECIPE_LABEL
from powerband.serve.discovery import Discovered, OnChange
from powerband.serve.discovery.api_server import ApiServer, Credentials, Watched

_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_PODS = "/api/v1/namespaces/{}/pods"


@dataclass(frozen=True)
class PoolPods:
    """The pods of one InferencePool, or of a selector and ports if there is no such object."""

    credentials: Credentials
    namespace: str
    pool: str = ""
    selector: str = ""
    ports: tuple[int, ...] = ()

    async def watch(self, on_change: OnChange) -> None:
        """Report the endpoints; the pods are followed anew when the pool's selector changes."""
        async with ApiServer(self.credentials) as api:
            if not self.pool:
                await self._follow_pods(api, self.selector, self.ports, on_change)
                return
            await self._follow_pool(api, on_change)

    async def _follow_pool(self, api: ApiServer, on_change: OnChange) -> None:
        changed = asyncio.Event()
        pools = Watched(api, _POOLS.format(self.namespace), changed.set, fieldSelector=f"metadata.name={self.pool}")
        pods: asyncio.Task[None] | None = None
        current: tuple[str, tuple[int, ...]] | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(pools.run())
            while True:
                await changed.wait()
                changed.clear()
                found = pools.objects.get(self.pool)
                wanted = pool_target(found) if found else None
                if not pools.connected or wanted == current:
                    continue
                current = wanted
                if pods:
                    pods.cancel()
                    pods = None
                if wanted is None:
                    on_change([])  # the pool was deleted
                else:
                    pods = group.create_task(self._follow_pods(api, *wanted, on_change))

    async def _follow_pods(self, api: ApiServer, selector: str, ports: tuple[int, ...], on_change: OnChange) -> None:
        changed = asyncio.Event()
        pods = Watched(api, _PODS.format(self.namespace), changed.set, labelSelector=selector)
        last: list[Discovered] | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(pods.run())
            while True:
                await changed.wait()
                await asyncio.sleep(0)  # events that arrived together are one change
                changed.clear()
                found = endpoints(pods.objects.values(), ports)
                if pods.relists and found != last:
                    last = found
                    on_change(found)


def pool_target(pool: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the label selector and the ports of an InferencePool."""
    spec = pool["spec"]
    labels = spec.get("selector", {}).get("matchLabels", {})
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return selector, tuple(one["number"] for one in spec.get("targetPorts", ()))


def endpoints(pods: Iterable[Mapping[str, Any]], ports: tuple[int, ...]) -> list[Discovered]:
    """Return an endpoint for each port of each pod that has an address and has not ended."""
    found = []
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status", {})
        if not (ip := status.get("podIP")) or status.get("phase") in ("Succeeded", "Failed"):
            continue
        host = f"[{ip}]" if ":" in ip else ip
        ready = _condition(status, "Ready")
        is_ready = ready.get("status") == "True" and "deletionTimestamp" not in metadata
        for port in ports:
            found.append(
                Discovered(
                    name=metadata["name"] if len(ports) == 1 else f"{metadata['name']}:{port}",
                    address=f"{host}:{port}",
                    ready=is_ready,
                    recipe=metadata.get("labels", {}).get(RECIPE_LABEL, ""),
                    start_s=_duration_s(status.get("startTime"), ready.get("lastTransitionTime")) if is_ready else None,
                )
            )
    return found


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions", ()) if one.get("type") == kind), {})


def _duration_s(start: str | None, end: str | None) -> float | None:
    """Return the seconds between two times of the API; None if one is missing."""
    if not start or not end:
        return None
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())
