"""Sample the state of NVIDIA GPUs: utilisation, power, clock limits, and the processes on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_POWER = 0x4 | 0x80  # nvmlClocksEventReasons: SW power cap, HW power brake
_THERMAL = 0x8 | 0x20 | 0x40  # HW slowdown, SW and HW thermal slowdown


@dataclass(frozen=True)
class GpuSample:
    """The state of one GPU; None: the driver does not answer."""

    index: int
    busy: float | None
    power_limited: bool | None
    thermal_limited: bool | None
    pids: frozenset[int] | None


class Session:
    """An open connection to the driver; without one, there are no samples."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def sample(self) -> tuple[GpuSample, ...]:
        """Return the state of every GPU."""
        return tuple(_sample(index, handle) for index, handle in enumerate(self._handles))


@contextlib.contextmanager
def session() -> Iterator[Session]:
    """Connect to NVML for a while."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield Session([])
        return
    handles = []
    try:
        with contextlib.suppress(pynvml.NVMLError):
            for index in range(pynvml.nvmlDeviceGetCount()):
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        yield Session(handles)
    finally:
        pynvml.nvmlShutdown()


def _sample(index: int, handle: Any) -> GpuSample:
    import pynvml

    silent = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
    busy = pids = reasons = None
    with contextlib.suppress(*silent):
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(*silent):
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    with contextlib.suppress(*silent):
        pids = frozenset(one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    power, thermal = (None, None) if reasons is None else (bool(reasons & _POWER), bool(reasons & _THERMAL))
    return GpuSample(index, busy, power, thermal, pids)
