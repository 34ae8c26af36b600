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

from powerband.core.host import Host, NumaNode
from powerband.runtime import gpus

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
    total, free = _memory()
    limit, used = _cgroup_memory()
    available = free if limit is None else min(free, max(limit - used, 0))
    flags = cpu_flags()
    found, gpu_problem = gpus.visible(system_root())
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        cpu_name=_cpu_name(),
        cores=cores(),
        core_threads=_core_threads(),
        numa_nodes=_numa_nodes(),
        memory_bytes=total if limit is None else min(total, limit),
        available_bytes=available,
        memory_limit_bytes=limit,
        cpu_quota=cpu_quota(),
        instruction_sets=flags,
        amx_usable="amx_tile" in flags and _amx_works(),
        compiler=next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None),
        nvcc=shutil.which("nvcc"),
        gpus=found,
        gpu_problem=gpu_problem,
    )


def system_root() -> str:
    """Return the folder whose `proc` and `sys` describe the machine; empty: the machine itself."""
    return os.environ.get("POWERBAND_SYSTEM_ROOT", "")


def _system(path: str) -> Path:
    return Path(f"{system_root()}{path}")


def _memory() -> tuple[int, int]:
    """Return the total and the available memory."""
    if not system_root():
        memory = psutil.virtual_memory()
        return memory.total, memory.available
    lines = [line.split() for line in _system("/proc/meminfo").read_text().splitlines()]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def _core_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return tuple(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))


def cores() -> tuple[int, ...]:
    """Return the CPU cores that this process may run on."""
    if system_root():
        return _core_list(_system("/sys/devices/system/cpu/online").read_text())
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _core_threads() -> tuple[tuple[int, ...], ...]:
    """Return the usable hardware threads of each core."""
    usable, found = set(cores()), dict[tuple[int, ...], None]()
    for core in sorted(usable):
        threads: tuple[int, ...] = (core,)
        with contextlib.suppress(OSError, ValueError):
            path = _system(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            threads = tuple(one for one in _core_list(path.read_text()) if one in usable) or threads
        found[threads] = None
    return tuple(found)


def _numa_nodes() -> tuple[NumaNode, ...]:
    nodes = []
    for folder in sorted(_system("/sys/devices/system/node").glob("node[0-9]*")):
        own: tuple[int, ...] = ()
        lines = [line.split() for line in (folder / "meminfo").read_text().splitlines()]
        kib = {words[2].rstrip(":"): int(words[3]) for words in lines}
        reclaimable = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) + kib.get("SReclaimable", 0)
        available = (kib["MemFree"] + reclaimable) * 1024
        with contextlib.suppress(OSError, ValueError):
            own = _core_list((folder / "cpulist").read_text())
        nodes.append(
            NumaNode(
                index=int(folder.name[4:]),
                cores=own,
                memory_bytes=kib["MemTotal"] * 1024,
                available_bytes=available,
            )
        )
    return tuple(nodes)


def _cpuinfo(field: str) -> str:
    with contextlib.suppress(OSError):
        for line in _system("/proc/cpuinfo").read_text().splitlines():
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
        for line in _system("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _system("/sys/fs/cgroup") / controllers
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


def cpu_quota() -> float | None:
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


def cgroup_cpu_s() -> float | None:
    """Return the CPU seconds that all processes of this process's cgroup have used; None: the kernel does not say."""
    for folder in _cgroup_folders():
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = (folder / "cpu.stat").read_text().splitlines()
            return int(dict(line.split(" ", 1) for line in lines)["usage_usec"]) / 1e6
        if (used_ns := _read_number(folder / "cpuacct.usage")) is not None:
            return used_ns / 1e9
    return None
