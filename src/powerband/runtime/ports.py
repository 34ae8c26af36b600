"""Ports that nobody else of ours will take, and that the kernel gives to no client meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from powerband.errors import InputError

# Below the kernel's range for outgoing connections, so that no client is handed one of these by chance.
_LOW, _HIGH = 20_000, 32_000


class Port:
    """A reserved port: locked among Powerband's processes until released, free by a trial bind."""

    def __init__(self, number: int, lock: IO[bytes]) -> None:
        self.number, self._lock = number, lock

    def __enter__(self) -> Port:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()


def reserve(host: str, number: int | None = None) -> Port:
    """Reserve the given port, or any; the lock dies with this process, however it dies."""
    if number is not None:
        port = _try(host, number)
        if port is None:
            raise InputError(
                f"port {number} on {host} is taken", hint="give another --port, or none to have one picked"
            )
        return port
    for candidate in random.sample(range(_LOW, _HIGH), 2000):
        if port := _try(host, candidate):
            return port
    raise InputError(f"no free port between {_LOW} and {_HIGH} on {host}", hint="stop something, or give --port")


def _try(host: str, number: int) -> Port | None:
    folder = Path(tempfile.gettempdir()) / f"powerband-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = (folder / str(number)).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
            trial.bind((host, number))
        return Port(number, lock)
    except socket.gaierror:
        lock.close()
        raise InputError(f"{host} is not an address of this machine", hint="use 127.0.0.1 or 0.0.0.0") from None
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"{host} is not an address of this machine", hint="use 127.0.0.1 or 0.0.0.0") from None
        return None
