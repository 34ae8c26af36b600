"""Hold devices and cores, so that no other Powerband process of this user places a replica on them.

A lease is a set of locked files, one for each device or core. The keeper of the engine inherits the locks: they end
with the last of both processes, for any reason, so a lease can neither leak nor outlive its engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from powerband.core.allocation import Allocation, Need, allocate, units
from powerband.core.host import Host
from powerband.runtime import devices


class Lease:
    """Devices and cores that are held until `close`, or until all processes with its files have ended."""

    def __init__(self, allocation: Allocation, files: list[IO[str]]) -> None:
        self.allocation, self._files = allocation, files

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the locked files, for a child process to inherit."""
        return tuple(file.fileno() for file in self._files)


def acquire(host: Host, need: Need, *, name: str = "") -> Lease:
    """Choose devices and cores that no running replica holds, and hold them; raise NoRoom if too few are free."""
    with _locked("allocation"):
        free = {unit: file for unit in units(host) if (file := _try(unit))}
        try:
            allocation = allocate(host, need, taken=set(units(host)) - set(free))
            held = [free.pop(unit) for unit in allocation.units]
        finally:
            for file in free.values():
                file.close()
        for file in held:
            file.truncate(0)
            file.write(f"{os.getpid()} {name}\n")
            file.flush()
        return Lease(allocation, held)


def held(host: Host) -> dict[str, str]:
    """Return the held devices and cores of a host, each with the process and the deployment that hold it."""
    found = {}
    with _locked("allocation"):  # an allocation would take the tried locks for held ones
        for unit in units(host):
            if file := _try(unit):
                file.close()
            else:
                found[unit] = (_folder() / unit).read_text().strip()
    return found


def _folder() -> Path:
    folder = Path(devices.system_root() or tempfile.gettempdir()) / f"powerband-leases-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _try(unit: str) -> IO[str] | None:
    """Return the locked file of a device or core; None: another process holds it."""
    file = (_folder() / unit).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock that is waited for."""
    with (_folder() / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
