"""Watch the machine and the engine while a level runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from powerband.core.engine import Gauges
from powerband.runtime.replica import Replica

EVERY_S = 1.0
_CALM_S, _CALM_LOOKS = 60.0, 2


async def wait_until_idle(replica: Replica) -> None:
    """Wait until nothing of an earlier load is left in an engine of ours: what was given up it may still work off."""
    until, idle = time.monotonic() + _CALM_S, 0
    while replica.process is not None and idle < _CALM_LOOKS and time.monotonic() < until:
        gauges = await replica.gauges()
        idle = 0 if gauges.running or gauges.queue_depth else idle + 1
        await asyncio.sleep(0.1)


@dataclass
class Monitor:
    """Readings of the engine's gauges and of the CPU, with the moments at which they were taken."""

    replica: Replica
    at_ns: list[int] = field(default_factory=list)
    gauges: list[Gauges] = field(default_factory=list)
    cpu: list[tuple[float, float, float]] = field(default_factory=list)  # busy, stolen, ours; seconds

    async def __aenter__(self) -> Monitor:
        self._ours = _Ours(self.replica.url)
        await self._look()
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._look()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self._look()

    async def _look(self) -> None:
        began = time.monotonic_ns()
        gauges = await self.replica.gauges()
        self.at_ns.append((began + time.monotonic_ns()) // 2)
        self.gauges.append(gauges)
        self.cpu.append(self._ours.read())

    def between(self, begin_ns: int, end_ns: int) -> list[int]:
        """Return which readings lie within a span of time."""
        return [place for place, moment in enumerate(self.at_ns) if begin_ns <= moment <= end_ns]

    def foreign_share(self, places: list[int]) -> tuple[float | None, float]:
        """Return which part of the machine's CPU went to others, and which of that to its host."""
        if len(places) < 2:
            return None, 0.0
        first, last = self.cpu[places[0]], self.cpu[places[-1]]
        elapsed = (self.at_ns[places[-1]] - self.at_ns[places[0]]) / 1e9
        capacity = elapsed * (psutil.cpu_count() or 1)
        busy, stolen, ours = (late - early for early, late in zip(first, last, strict=True))
        return max(0.0, busy + stolen - ours) / capacity, stolen / capacity


class _Ours:
    """CPU seconds of this process, of what it started, and of the server where that is on this machine."""

    def __init__(self, url: str) -> None:
        self._roots = [psutil.Process()]
        self._last: dict[int, float] = {}
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost", "::1"):
            self._roots += _listening(parts.port or 80)

    def read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        stolen = getattr(times, "steal", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        busy = sum(times) - idle - stolen - guests
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        used = process.cpu_times()
                        self._last[process.pid] = used.user + used.system
        return busy, stolen, sum(self._last.values())


def _listening(port: int) -> list[psutil.Process]:
    """Return the processes that listen on a port here, where we may see them."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                found.append(psutil.Process(one.pid))
    return found
