"""One way to the server: the compiled wire where there is one, plain Python otherwise."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from powerband.errors import InputError
from powerband.load import python_wire

compiled: Any
try:
    from powerband.load import _wire as compiled
except ImportError:  # it was not compiled: no compiler, or not Linux
    compiled = None
if os.environ.get("POWERBAND_PURE"):
    compiled = None


@dataclass(frozen=True)
class Target:
    """Where requests go, and what each of them carries."""

    url: str
    model: str
    headers: tuple[tuple[str, str], ...] = ()
    keep_alive: bool = True  # False: this server does badly with a connection that is used again

    @property
    def secure(self) -> bool:
        """Tell whether TLS is spoken."""
        return self.url.startswith("https:")

    @property
    def host(self) -> str:
        """Return the name that the server is called by."""
        return urlsplit(self.url).hostname or ""

    def head(self, path: str, length: int) -> bytes:
        """Return the head of a request."""
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        lines += [] if self.keep_alive else ["Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode()


def connect(target: Target, *, limit: int = 0, senders: int = 1) -> Any:
    """Return a wire to the target, or several as one; its name is looked up once, before any clock runs."""
    parts = urlsplit(target.url)
    port = parts.port or (443 if target.secure else 80)
    try:
        address = socket.getaddrinfo(target.host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InputError(f"{target.host} cannot be found: {error}", hint="check the URL") from None
    if target.secure or compiled is None:
        return python_wire.Wire(str(address), str(port), limit, tls=target.host if target.secure else None)
    if senders == 1:
        return compiled.Wire(str(address), str(port), limit)
    return _Several([compiled.Wire(str(address), str(port), -(-limit // senders)) for _ in range(senders)])


class _Several:
    """Several compiled wires that look like one: each is a thread that holds no lock of Python's."""

    def __init__(self, wires: list[Any]) -> None:
        self.wires = wires

    def submit(self, id: int, due_ns: int, data: bytes, chain: int, after_ns: int, whole: bool) -> None:
        wire = self.wires[(chain if chain >= 0 else id) % len(self.wires)]
        wire.submit(id, due_ns, data, chain, after_ns, whole)

    def warm(self, count: int) -> None:
        for wire in self.wires:
            wire.warm(-(-count // len(self.wires)))

    def collect(self, seconds: float) -> list[Any]:
        return [one for wire in self.wires for one in wire.collect(seconds / len(self.wires))]

    def stop(self) -> None:
        for wire in self.wires:
            wire.stop()

    def state(self) -> dict[str, int]:
        """Add up what the threads tell; lateness and CPU are those of the busiest."""
        states = [wire.state() for wire in self.wires]
        worst = ("worst_wake_ns", "cpu_ns")
        return {key: (max if key in worst else sum)(state[key] for state in states) for key in states[0]}

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def kind(target: Target) -> str:
    """Return which wire `connect` would take."""
    return "pure" if target.secure or compiled is None else "compiled"
