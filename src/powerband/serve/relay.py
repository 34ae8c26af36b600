"""The relay in front of one engine: `python -m powerband.serve.relay HOST PORT ENGINE_PORT` runs until killed.

It turns an engine crash into a redirect to the picker, or into a final error event of the stream: see _relay.c.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import sys

from powerband.core.engine import Command


def compiled() -> bool:
    """Tell whether the C extension is installed; without it a crash closes the stream with no error event."""
    return importlib.util.find_spec("powerband.serve._relay") is not None


def command(host: str, port: int, engine_port: int) -> Command:
    """Return the command that starts a relay."""
    return Command(argv=(sys.executable, "-m", "powerband.serve.relay", host, str(port), str(engine_port)))


def redirect_waiting(pid: int) -> None:
    """Let a relay redirect the requests that have no token yet, so that the picker chooses another replica."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


if __name__ == "__main__":
    from powerband.serve import _relay

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    host, port, engine_port = sys.argv[1:]
    with socket.create_server((host, int(port)), backlog=1024) as listener:
        listener.setblocking(False)
        _relay.run(listener.fileno(), int(engine_port))
