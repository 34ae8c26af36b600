"""Sample the engine's gauges and the machine's CPU while a level runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from powerband.core.engine import Gauges
from powerband.runtime import devices
from powerband.runtime.listeners import listening
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
    cpu: list[CpuTimes] = field(default_factory=list)

    async def __aenter__(self) -> Monitor:
        self._own_cpu = _OwnCpu([one.url for one in self.replica.members])
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
        """Return the shares of our CPU limit that other processes (including steal) and CPU steal alone take.

        A window with fewer than two samples is too short to have its own: then those next to it count too.
        """
        if len(samples) < 2:
            first = min(samples, default=len(self.at_ns) - 1) - 1
            samples = list(range(max(0, first), len(self.at_ns)))[:3]
        if len(samples) < 2:
            return None, 0.0
        elapsed_s = (self.at_ns[samples[-1]] - self.at_ns[samples[0]]) / 1e9
        return background_share(self.cpu[samples[0]], self.cpu[samples[-1]], elapsed_s, self._own_cpu.limit)


class CpuTimes(NamedTuple):
    """CPU seconds since the machine started, on the cores that this process may use."""

    busy: float  # all processes
    stolen: float  # by the hypervisor
    own: float  # this process, its children and the measured server
    group: float | None  # all processes of our cgroup, on any core


class CpuLimit(NamedTuple):
    """The cores that this process may run on, and how many of them it may use at once."""

    cores: float
    usable: float


def background_share(first: CpuTimes, last: CpuTimes, elapsed_s: float, limit: CpuLimit) -> tuple[float, float]:
    """Return the shares of our CPU limit taken by other processes (including steal), and by CPU steal alone.

    Processes of our cgroup share its limit with us. Processes of other cgroups take only cores that our limit leaves
    free, until these are used up.
    """
    stolen, own = last.stolen - first.stolen, last.own - first.own
    background = max(0.0, last.busy - first.busy + stolen - own)
    group = own if first.group is None or last.group is None else last.group - first.group
    inside = min(max(0.0, group - own), background)
    outside = max(0.0, background - inside - (limit.cores - limit.usable) * elapsed_s)
    capacity = elapsed_s * limit.usable
    return (inside + outside) / capacity, stolen / capacity


class _OwnCpu:
    """CPU seconds of this process, its children, and the measured servers if they run on this machine."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._roots = [psutil.Process()]
        self._last: dict[int, float] = {}
        self._cores = devices.cores()
        self.limit = CpuLimit(len(self._cores), min(devices.cpu_quota() or math.inf, len(self._cores)))
        for parts in map(urlsplit, urls):
            if parts.hostname in ("127.0.0.1", "localhost", "::1"):
                self._roots += listening(parts.port or 80)

    def read(self) -> CpuTimes:
        busy = stolen = 0.0
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in self._cores:
                idle = times.idle + getattr(times, "iowait", 0.0)
                steal = getattr(times, "steal", 0.0)
                guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
                busy, stolen = busy + sum(times) - idle - steal - guests, stolen + steal
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        used = process.cpu_times()
                        self._last[process.pid] = used.user + used.system
        return CpuTimes(busy, stolen, sum(self._last.values()), devices.cgroup_cpu_s())
