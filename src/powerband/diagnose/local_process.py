"""Read the server's process on this machine: command line, known environment variables, threads, limits, memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from powerband.engines import live
from powerband.errors import InputError
from powerband.runtime.listeners import listening

_ENVIRONMENT = re.compile(r"^(OMP_|KMP_|GOMP_|VLLM_|LLAMA_ARG_|GGML_|CUDA_VISIBLE|HIP_VISIBLE|NCCL_|LD_PRELOAD$)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class ProcessSample:
    """One reading of a server's processes; times and counts are since their start."""

    thread_cpu_s: dict[int, float]  # by thread id
    process_of: dict[int, int]  # the process of each thread
    cpu_s: float
    machine_busy_s: float  # all processes on the machine
    throttled_periods: float | None
    periods: float | None
    major_faults: float
    swap_bytes: float
    swapped_in_bytes: float
    log_bytes: float | None


@dataclass(frozen=True)
class LocalProcess:
    """A server's process, with its children."""

    pid: int
    argv: tuple[str, ...]
    environment: dict[str, str]
    log: Path | None
    root: psutil.Process

    def members(self) -> list[psutil.Process]:
        """Return the process and its children."""
        with contextlib.suppress(psutil.Error):
            return [self.root, *self.root.children(recursive=True)]
        return [self.root]

    def pids(self) -> frozenset[int]:
        """Return the ids of the process and of its children."""
        return frozenset(one.pid for one in self.members())

    def cores(self) -> frozenset[int]:
        """Return the cores that any of its processes may run on."""
        found: set[int] = set()
        for one in self.members():
            with contextlib.suppress(psutil.Error, AttributeError):
                found |= set(one.cpu_affinity())
        return frozenset(found)

    def thread_cores(self, thread: int) -> frozenset[int]:
        """Return the cores that one thread may run on; empty: unknown."""
        for path in (Path(f"/proc/{one.pid}/task/{thread}/status") for one in self.members()):
            with contextlib.suppress(OSError):
                match = re.search(r"Cpus_allowed_list:\s*(\S+)", path.read_text())
                return frozenset(_core_list(match[1])) if match else frozenset()
        return frozenset()

    def cpu_quota(self) -> float | None:
        """Return the CPU limit of its cgroups, in cores; None: unlimited, or unknown."""
        quotas = []
        for folder in _cgroups(self.pid):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))
            with contextlib.suppress(OSError, ValueError):
                quota_us = int((folder / "cpu.cfs_quota_us").read_text())
                if quota_us > 0:
                    quotas.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
        return min(quotas, default=None)

    def sample(self) -> ProcessSample:
        """Read what changes."""
        threads: dict[int, float] = {}
        process_of: dict[int, int] = {}
        cpu_s = faults = swap = 0.0
        for one in self.members():
            with contextlib.suppress(psutil.Error):
                for thread in one.threads():
                    threads[thread.id] = thread.user_time + thread.system_time
                    process_of[thread.id] = one.pid
                times = one.cpu_times()
                cpu_s += times.user + times.system
                faults += _major_faults(one.pid)
                swap += _swapped(one.pid)
        throttled, periods = _throttling(self.pid)
        busy = psutil.cpu_times()
        log_bytes = None
        if self.log:
            with contextlib.suppress(OSError):
                log_bytes = float(self.log.stat().st_size)
        return ProcessSample(
            thread_cpu_s=threads,
            process_of=process_of,
            cpu_s=cpu_s,
            machine_busy_s=sum(busy) - busy.idle - getattr(busy, "iowait", 0.0) - getattr(busy, "guest", 0.0),
            throttled_periods=throttled,
            periods=periods,
            major_faults=faults,
            swap_bytes=swap,
            swapped_in_bytes=float(psutil.swap_memory().sin),
            log_bytes=log_bytes,
        )


def find(*, pid: int | None, port: int) -> LocalProcess | None:
    """Return the server's process by its id, or the engine that listens on the port; None: not visible."""
    if pid is not None:
        try:
            return _process(psutil.Process(pid))
        except psutil.Error as error:
            raise InputError(
                f"process {pid} cannot be read: {type(error).__name__}", hint="check --pid, or run as its user"
            ) from None
    for one in listening(port):
        with contextlib.suppress(psutil.Error):
            found = _process(one)
            if live.engine_of(argv=found.argv):  # else a proxy listens there
                return found
    return None


def _process(one: psutil.Process) -> LocalProcess:
    """Return a process; if it is a child of the server's first process, return that one."""
    root = one
    while live.engine_of(argv=_argv(root)) is None:
        parent = root.parent()
        if parent is None or parent.pid == 1 or live.engine_of(argv=_argv(parent)) is None:
            break
        root = parent
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error):
        environment = {
            key: value for key, value in root.environ().items() if _ENVIRONMENT.match(key) and not _SECRET.search(key)
        }
    return LocalProcess(root.pid, tuple(_argv(root)), environment, _log_of(root.pid), root)


def _argv(one: psutil.Process) -> list[str]:
    try:
        return list(one.cmdline())
    except psutil.Error:
        return []


def _log_of(pid: int) -> Path | None:
    """Return the file that the process writes its output to; None: a terminal or a pipe."""
    for descriptor in (2, 1):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
            if path.is_file():
                return path
    return None


def _major_faults(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])
    return 0.0


def _swapped(pid: int) -> float:
    with contextlib.suppress(OSError):
        if match := re.search(r"VmSwap:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return float(match[1]) * 1024
    return 0.0


def _cgroups(pid: int) -> Iterator[Path]:
    """Yield the cgroup folders of a process and their parents, innermost first."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup") / controllers
            here = root / path.lstrip("/")
            yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(root))


def _throttling(pid: int) -> tuple[float | None, float | None]:
    """Return how many CPU periods of its cgroup were throttled, and how many there were."""
    for folder in _cgroups(pid):
        with contextlib.suppress(OSError, ValueError, KeyError):
            values = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            if int(values["nr_periods"]):
                return float(values["nr_throttled"]), float(values["nr_periods"])
    return None, None


def _core_list(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)]
