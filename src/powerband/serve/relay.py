"""The relay in front of one engine: its command, and what the supervisor tells it.

It turns an engine crash into a redirect to the picker, or into a final error event of the stream: see _relay.c.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

from powerband.core.engine import Command
from powerband.errors import EngineMissing

_PROCESS = Path(__file__).with_name("relay_process.py")


def extension() -> str:
    """Return the path of the C extension; raise EngineMissing if it is not installed."""
    found = importlib.util.find_spec("powerband.serve._relay")
    if found is None or found.origin is None:
        raise EngineMissing(
            "the relay of 'serve' was not compiled when Powerband was installed",
            hint="install a C compiler, then run: pip install --force-reinstall --no-deps powerband",
        )
    return found.origin


def command(host: str, port: int, engine_port: int, secret: str = "") -> Command:
    """Return the command that starts a relay; with a secret it refuses requests without it."""
    argv = (sys.executable, "-I", "-S", str(_PROCESS), extension(), host, str(port), str(engine_port))
    return Command(argv=argv, env={"POWERBAND_RELAY_SECRET": secret} if secret else {})


def redirect_waiting(pid: int) -> None:
    """Let a relay redirect the requests that have no token yet, so that the picker chooses another replica."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
