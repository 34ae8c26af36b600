"""Read the hardware of this machine: cores, memory, cgroup limits, instruction sets, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from powerband.core.host import Gpu, Host, NumaNode

# Request AMX tile permission from the kernel and use a tile. It runs in a child process, which an illegal instruction
# would kill.
_TRY_AMX = """
import ctypes, mmap
if ctypes.CDLL(None).syscall(158, 0x1023, 18): raise SystemExit(1)
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("c4e2784907" "c4e27b49c0" "c4e27849c0" "c3"))
tiles = (ctypes.c_uint8 * 64)(1, *[0] * 15, 64, *[0] * 31, 16)
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start)(ctypes.addressof(tiles))
"""


def this_host() -> Host:
    """Return the part of the machine that this process may use, by its CPU affinity and cgroup limits."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    available = memory.available if limit is None else min(memory.available, max(limit - used, 0))
    flags = cpu_flags()
    gpus, gpu_problem = _gpus()
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        cpu_name=_cpu_name(),
        cores=_cores(),
        numa_nodes=_numa_nodes(),
        memory_bytes=memory.total if limit is None else min(memory.total, limit),
        available_bytes=available,
        memory_limit_bytes=limit,
        cpu_quota=_cpu_quota(),
        instruction_sets=flags,
        amx_usable="amx_tile" in flags and _amx_works(),
        compiler=next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None),
        nvcc=shutil.which("nvcc"),
        gpus=gpus,
        gpu_problem=gpu_problem,
    )


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _numa_nodes() -> tuple[NumaNode, ...]:
    nodes = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        lines = [line.split() for line in (folder / "meminfo").read_text().splitlines()]
        kib = {words[2].rstrip(":"): int(words[3]) for words in lines}
        reclaimable = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) + kib.get("SReclaimable", 0)
        available = (kib["MemFree"] + reclaimable) * 1024
        nodes.append(
            NumaNode(index=int(folder.name[4:]), memory_bytes=kib["MemTotal"] * 1024, available_bytes=available)
        )
    return tuple(nodes)


def _cpuinfo(field: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.partition(":")[0].strip() == field:
                return line.partition(":")[2].strip()
    return ""


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that the kernel reports."""
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _amx_works() -> bool:
    return subprocess.run([sys.executable, "-I", "-S", "-c", _TRY_AMX], capture_output=True).returncode == 0


def _cgroup_folders() -> list[Path]:
    """Return the cgroup directories of this process and all their parents, innermost first."""
    folders = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / controllers
            here = root / path.lstrip("/")
            folders += [folder for folder in (here, *here.parents) if folder.is_relative_to(root)]
    return folders


def _read_number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text().split()[0])
    return None


def _cgroup_memory() -> tuple[int | None, int]:
    """Return the lowest memory limit of this process's cgroups, and the memory used in that cgroup."""
    lowest: tuple[int | None, int] = (None, 0)
    for folder in _cgroup_folders():
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _read_number(folder / limit_file)
            if limit is not None and limit < 2**60 and (lowest[0] is None or limit < lowest[0]):
                used = (_read_number(folder / used_file) or 0) - _reclaimable(folder)
                lowest = (limit, max(used, 0))
    return lowest


def _reclaimable(folder: Path) -> int:
    """Return the file cache that the kernel can reclaim."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _cpu_quota() -> float | None:
    """Return the CPU limit of the cgroup, in cores; None: unlimited."""
    quotas = []
    for folder in _cgroup_folders():
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        quota_us, period_us = (
            _read_number(folder / "cpu.cfs_quota_us"),
            _read_number(folder / "cpu.cfs_period_us"),
        )
        if quota_us and period_us and quota_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs from NVML, and a problem with the driver; a machine without a driver has neither."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return (), None
    except pynvml.NVMLError as error:
        return (), f"NVML cannot connect to the NVIDIA driver: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(index, driver) for index in range(pynvml.nvmlDeviceGetCount())), None
    except pynvml.NVMLError as error:
        return (), f"NVML failed: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, driver: str) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = None
    with contextlib.suppress(pynvml.NVMLError):
        capability = ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=driver,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        compute_capability=capability,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
