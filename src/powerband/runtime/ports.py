"""Reserve TCP ports among the Powerband processes of a user."""

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

# Below the kernel's ephemeral range, so that no outgoing connection uses one of these ports.
_LOW, _HIGH = 20_000, 32_000


class Port:
    """A reserved port: other Powerband processes do not use it until it is released."""

    def __init__(self, number: int, lock: IO[bytes]) -> None:
        self.number, self._lock = number, lock

    def __enter__(self) -> Port:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()


def reserve(host: str, number: int | None = None) -> Port:
    """Reserve a port, by default any free one; the kernel releases the lock when this process ends."""
    if number is not None:
        port = _try(host, number)
        if port is None:
            raise InputError(
                f"port {number} on {host} is in use", hint="give another --port, or omit --port to get a free one"
            )
        return port
    for candidate in random.sample(range(_LOW, _HIGH), 2000):
        if port := _try(host, candidate):
            return port
    raise InputError(
        f"no free port between {_LOW} and {_HIGH} on {host}", hint="stop servers that use these ports, or give --port"
    )


def resolve(host: str) -> str:
    """Return the IP address of a host name; an address is returned as it is."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"'{host}' is not an address of this machine: {error.strerror}",
            hint="give an IP address, such as 127.0.0.1",
        ) from None
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _try(host: str, number: int) -> Port | None:
    folder = Path(tempfile.gettempdir()) / f"powerband-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = (folder / str(number)).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
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
