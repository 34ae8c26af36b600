"""Sample the engine's gauges and the machine's CPU while a level runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from powerband.core.engine import Gauges
from powerband.runtime.replica import Replica

INTERVAL_S = 1.0
_IDLE_TIMEOUT_S = 60.0
_IDLE_SAMPLES = 2  # consecutive samples without a request


async def wait_until_idle(replica: Replica) -> None:
    """Wait until a local engine has no requests left from an earlier load; it may still process cancelled ones."""
    deadline, idle = time.monotonic() + _IDLE_TIMEOUT_S, 0
    while replica.process is not None and idle < _IDLE_SAMPLES and time.monotonic() < deadline:
        gauges = await replica.gauges()
        idle = 0 if gauges.running or gauges.queue_depth else idle + 1
        await asyncio.sleep(0.1)


@dataclass
class Monitor:
    """Samples of the engine's gauges and of CPU time, with their timestamps."""

    replica: Replica
    at_ns: list[int] = field(default_factory=list)
    gauges: list[Gauges] = field(default_factory=list)
    cpu: list[tuple[float, float, float]] = field(default_factory=list)  # seconds: busy, stolen, own processes

    async def __aenter__(self) -> Monitor:
        self._own_cpu = _OwnCpu(self.replica.url)
        await self._sample()
        self._task = asyncio.create_task(self._sample_regularly())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._sample()

    async def _sample_regularly(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._sample()

    async def _sample(self) -> None:
        began = time.monotonic_ns()
        gauges = await self.replica.gauges()
        self.at_ns.append((began + time.monotonic_ns()) // 2)
        self.gauges.append(gauges)
        self.cpu.append(self._own_cpu.read())

    def between(self, begin_ns: int, end_ns: int) -> list[int]:
        """Return the indices of the samples within a time span."""
        return [index for index, at_ns in enumerate(self.at_ns) if begin_ns <= at_ns <= end_ns]

    def background_share(self, samples: list[int]) -> tuple[float | None, float]:
        """Return the shares of the machine's CPU used by other processes (including steal) and stolen by its host."""
        if len(samples) < 2:
            return None, 0.0
        first, last = self.cpu[samples[0]], self.cpu[samples[-1]]
        elapsed = (self.at_ns[samples[-1]] - self.at_ns[samples[0]]) / 1e9
        capacity = elapsed * (psutil.cpu_count() or 1)
        busy, stolen, own = (late - early for early, late in zip(first, last, strict=True))
        return max(0.0, busy + stolen - own) / capacity, stolen / capacity


class _OwnCpu:
    """CPU seconds of this process, its children, and the measured server if it runs on this machine."""

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
    """Return the local processes that listen on a port, as far as permissions allow."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                found.append(psutil.Process(one.pid))
    return found
