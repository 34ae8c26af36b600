"""The compiled golden server: build it, run it with known latencies and faults, read what it recorded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("golden.c")


def binary() -> Path:
    """Return the compiled server; compile it if its source has changed."""
    cache = Path(os.environ.get("POWERBAND_CACHE") or Path.home() / ".cache" / "powerband") / "golden"
    path = cache / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O2", "-o", str(temporary), str(SOURCE), "-lm"], check=True)
        temporary.replace(path)
    return path


@dataclass
class Golden:
    """A running golden server; `truth` is filled by `end`."""

    port: int
    process: subprocess.Popen[bytes]
    truth_path: Path
    host: str = "127.0.0.1"
    truth: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def requests(self) -> list[tuple[int, int, int, int]]:
        """Return (read, first token, end, tokens) of each complete answer; times in ns of the monotonic clock."""
        return [(a, b, c, n) for a, b, c, n in self.truth["requests"] if c]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        if self.truth_path.exists():
            self.truth = json.loads(self.truth_path.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def golden(port: int | None = None, **options: int) -> Iterator[Golden]:
    """Run the server with these options; see golden.c."""
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "truth.json"
        settings = [f"{name}={value}" for name, value in options.items()]
        process = subprocess.Popen([str(binary()), str(port), str(truth), *settings])
        number = 0x7F000000 + options.get("loopback", 1)
        server = Golden(port, process, truth, socket.inet_ntoa(number.to_bytes(4, "big")))
        try:
            wait_for(port, server.host)
            yield server
        finally:
            server.end()


def wait_for(port: int, host: str = "127.0.0.1") -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.01)
    raise RuntimeError(f"nothing listens on {host}:{port}")
