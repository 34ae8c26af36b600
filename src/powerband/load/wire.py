"""The HTTP client of the load generator: the compiled wire if available, otherwise the one in Python."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from powerband.errors import InputError
from powerband.load import python_wire

compiled: Any
try:
    from powerband.load import _wire as compiled
except ImportError:  # not compiled: no C compiler, or not Linux
    compiled = None
if os.environ.get("POWERBAND_PURE"):
    compiled = None


@dataclass(frozen=True)
class Target:
    """The server that receives the requests, and the headers they carry."""

    url: str
    model: str
    headers: tuple[tuple[str, str], ...] = ()
    keep_alive: bool = True  # False: this server mishandles reused connections
    beside: tuple[str, ...] = ()  # URLs of servers that share the requests with this one

    @property
    def secure(self) -> bool:
        """Return whether the connection uses TLS."""
        return self.url.startswith("https:")

    @property
    def host(self) -> str:
        """Return the host name of the server."""
        return urlsplit(self.url).hostname or ""

    def head(self, path: str, length: int) -> bytes:
        """Return the HTTP header of a request."""
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        lines += [] if self.keep_alive else ["Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode()


def connect(target: Target, *, max_in_flight: int = 0, senders: int = 1, turns: int = 1) -> Any:
    """Return a wire to the target, with one thread per sender; the host name is resolved once, before the run.

    Servers that share the requests get them in turn, and all `turns` of a session go to the same one.
    """
    if target.beside:
        servers = [replace(target, url=url, beside=()) for url in (target.url, *target.beside)]
        each = -(-max_in_flight // len(servers))
        return _MultiWire([connect(one, max_in_flight=each, senders=senders) for one in servers], turns)
    parts = urlsplit(target.url)
    port = parts.port or (443 if target.secure else 80)
    try:
        address = socket.getaddrinfo(target.host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InputError(f"cannot resolve the host name {target.host}: {error}", hint="check the URL") from None
    if target.secure or compiled is None:
        return python_wire.Wire(str(address), str(port), max_in_flight, tls=target.host if target.secure else None)
    if senders == 1:
        return compiled.Wire(str(address), str(port), max_in_flight)
    each = -(-max_in_flight // senders)
    return _MultiWire([compiled.Wire(str(address), str(port), each) for _ in range(senders)])


class _MultiWire:
    """Several wires with the interface of one; a compiled one is a thread that runs without the GIL."""

    def __init__(self, wires: list[Any], turns: int = 1) -> None:
        self.wires, self.turns = wires, turns

    def submit(self, id: int, due_ns: int, data: bytes, chain: int, after_ns: int, whole: bool) -> None:
        wire = self.wires[(chain if chain >= 0 else id // self.turns) % len(self.wires)]
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
        """Return the sum over the threads; the maximum for wake-up delay and CPU time."""
        states = [wire.state() for wire in self.wires]
        worst = ("worst_wake_ns", "cpu_ns")
        return {key: (max if key in worst else sum)(state[key] for state in states) for key in states[0]}

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


def kind(target: Target) -> str:
    """Return which wire `connect` uses: `compiled` or `pure`."""
    return "pure" if target.secure or compiled is None else "compiled"
