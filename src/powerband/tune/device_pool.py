"""The devices of this machine, shared by trials that run side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from powerband.core.allocation import Need, capacity
from powerband.core.host import Host
from powerband.runtime import leases

CORES_PER_TRIAL = 6  # an engine's server and workers, and the load generator
_FREE_SHARE = 0.9  # of a device's memory: less is in use by others


class DevicePool:
    """Counts free devices; trials that wait get them in order of arrival, so large ones are not starved."""

    def __init__(self, devices: int) -> None:
        self.devices = self._free = devices
        self._turn, self._freed = asyncio.Lock(), asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        """Hold a number of devices, all of them if there are fewer."""
        count = min(count, self.devices)
        async with self._turn, self._freed:
            await self._freed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            async with self._freed:
                self._free += count
                self._freed.notify_all()


def free_devices(host: Host) -> int:
    """Return how many GPUs of a host nobody uses."""
    need = Need(devices=1, free_share=_FREE_SHARE)
    return capacity(host, need, taken=leases.held(host)) if host.gpus else 0


def side_by_side(host: Host, *, smallest: int) -> int:
    """Return how many trials may run at once, each with at least so many devices; 1 on a host without GPUs."""
    return max(1, min(free_devices(host) // smallest, len(host.cores) // CORES_PER_TRIAL))
