"""What the server's processes and its GPUs did over the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from powerband.core.host import Host
from powerband.diagnose.collect import Readings
from powerband.diagnose.local_process import LocalProcess, ProcessSample
from powerband.runtime import devices

_COMPUTING = 0.35  # CPU use from which a thread computes; half of it while the server has work half the time
_BUSY_GPU = 0.2  # utilisation from which a sample counts as busy


def facts(found: Readings) -> dict[str, Any]:
    """Return the facts of a local server; nothing for a remote one."""
    samples = [(one.at_s, one.process) for one in found.readings if one.process]
    if found.local is None or len(samples) < 2:
        return {}
    (begin_s, first), (end_s, last) = samples[0], samples[-1]
    assert first is not None and last is not None
    seconds = max(end_s - begin_s, 1e-9)
    host = devices.this_host()
    used = (last.cpu_s - first.cpu_s) / seconds
    allowed = frozenset[int]() if devices.system_root() else found.local.cores()  # a simulated host has its own
    cores = allowed or frozenset(host.cores)
    threads = {
        thread: (cpu_s - first.thread_cpu_s.get(thread, 0.0)) / seconds for thread, cpu_s in last.thread_cpu_s.items()
    }
    result: dict[str, Any] = {
        "local": True,
        "cores_used": used,
        "physical_cores": float(len({one for one in host.core_threads if cores & set(one)}) or len(cores)),
        "hardware_threads": float(len(cores)),
        "machine_cores": float(len(host.cores)),
        "cpu_quota": found.local.cpu_quota(),
        "throttled_share": _throttled(first, last),
        "busiest_thread": max(
            (share for thread, share in threads.items() if last.process_of[thread] == found.local.pid), default=None
        ),
        "background_cores": max(0.0, (last.machine_busy_s - first.machine_busy_s) / seconds - used),
        "swap_bytes": last.swap_bytes,
        "swap_bytes_per_s": (last.swapped_in_bytes - first.swapped_in_bytes) / seconds,
        "major_faults_per_s": max(0.0, last.major_faults - first.major_faults) / seconds,
        "numa_nodes": float(sum(bool(cores & set(node.cores)) for node in host.numa_nodes)) or None,
        **_compute_threads(found.local, threads, last.process_of),
        **_gpus(found, found.local, host),
    }
    if first.log_bytes is not None and last.log_bytes is not None:
        result["log_bytes_per_s"] = (last.log_bytes - first.log_bytes) / seconds
    return result


def _throttled(first: ProcessSample, last: ProcessSample) -> float | None:
    if first.periods is None or last.periods is None or first.throttled_periods is None:
        return None
    assert last.throttled_periods is not None
    return (last.throttled_periods - first.throttled_periods) / max(1.0, last.periods - first.periods)


def _compute_threads(
    local: LocalProcess, threads: Mapping[int, float], process_of: Mapping[int, int]
) -> dict[str, Any]:
    """Return how many threads of the busiest process compute, and the cores that these may run on together."""
    totals: dict[int, float] = {}
    for thread, share in threads.items():
        totals[process_of[thread]] = totals.get(process_of[thread], 0.0) + share
    worker = max(totals, key=totals.__getitem__, default=None)
    own = {thread: share for thread, share in threads.items() if process_of[thread] == worker}
    busiest = max(own.values(), default=0.0)
    if busiest < 0.1:
        return {}
    computing = [thread for thread, share in own.items() if share >= max(0.05, _COMPUTING * busiest)]
    cores = frozenset[int]().union(*(local.thread_cores(thread) for thread in computing))
    return {"compute_threads": float(len(computing)), "bound_cores": float(len(cores)) or None}


def _gpus(found: Readings, local: LocalProcess, host: Host) -> dict[str, Any]:
    """Return the GPUs that the server's processes use, and what limited their clocks while they were busy."""
    pids = local.pids()
    own = {gpu.index for one in found.readings for gpu in one.gpus if gpu.pids and gpu.pids & pids}
    if not any(gpu.pids is not None for one in found.readings for gpu in one.gpus):
        own = _configured_gpus(found, host)  # the driver does not list processes: in a container, or an old one
    if not own:
        return {}
    used = next((gpu for gpu in host.gpus if gpu.index in own), None)
    samples = [gpu for one in found.readings for gpu in one.gpus if gpu.index in own]
    busy = [gpu for gpu in samples if (gpu.busy or 0.0) >= _BUSY_GPU]
    capability = used.compute_capability if used else None
    return {
        "gpus": float(len(own)),
        "gpu_name": used.name if used else None,
        "compute_capability": float(capability) if capability else None,
        "gpu_busy": sum(gpu.busy or 0.0 for gpu in samples) / len(samples),
        "throttle_power_share": _share([gpu.power_limited for gpu in busy]),
        "throttle_thermal_share": _share([gpu.thermal_limited for gpu in busy]),
    }


def _configured_gpus(found: Readings, host: Host) -> set[int]:
    """Return the GPUs that the server's settings occupy."""
    sizes = [found.settings.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline", "data")]
    count = math.prod(sizes) if found.engine == "vllm" else len(host.gpus)
    return {gpu.index for gpu in host.gpus[:count]} if found.readings[-1].gpus else set()


def _share(flags: list[bool | None]) -> float | None:
    known = [flag for flag in flags if flag is not None]
    return sum(known) / len(known) if known else None
