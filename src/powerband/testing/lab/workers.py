"""The processes of an engine that hold its memory on devices: each ends with the engine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_libc = ctypes.CDLL(None, use_errno=True)


def start(name: str) -> int:
    """Start a process that only waits, and return its id. To be called while this process has one thread."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _wait(name, parent)
    return pid


def end(pids: list[int]) -> None:
    """End these processes and collect them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """Collect an ended process and return its exit code; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait(name: str, parent: int) -> NoReturn:
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _libc.prctl(_PR_SET_NAME, name.encode())
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)
        os.closerange(3, 4096)  # the socket of the engine, which its port must not outlive
        while os.getppid() == parent:
            signal.pause()
    finally:
        os._exit(0)
