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
from powerband.errors import EngineMissing


def check() -> None:
    """Raise EngineMissing if the C extension is not installed."""
    if importlib.util.find_spec("powerband.serve._relay") is None:
        raise EngineMissing(
            "the relay of 'serve' was not compiled when Powerband was installed",
            hint="install a C compiler, then run: pip install --force-reinstall --no-deps powerband",
        )


def command(host: str, port: int, engine_port: int, secret: str = "") -> Command:
    """Return the command that starts a relay; with a secret it refuses requests without it."""
    argv = (sys.executable, "-m", "powerband.serve.relay", host, str(port), str(engine_port))
    return Command(argv=argv, env={"POWERBAND_RELAY_SECRET": secret} if secret else {})


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
