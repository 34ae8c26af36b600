"""A child process with a keeper: stopped within a deadline, and killed if this process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from powerband.core.engine import Command
from powerband.errors import EngineFailed

KEEPER = Path(__file__).with_name("keeper.py")
LOG_MAX_BYTES = 32 * 2**20
_MARK = "POWERBAND_PROCESS"  # environment variable that all descendants inherit, in any session


class Process:
    """A running command that cannot outlive this process; use it with `async with`."""

    def __init__(self, command: Command, *, log: Path, grace_s: float = 3.0, inherited: tuple[int, ...] = ()) -> None:
        self.command, self.log, self.grace_s = command, log, grace_s
        self.inherited = inherited  # descriptors that the keeper keeps open until the command has ended
        self.pid: int | None = None
        self.exit_code: int | None = None  # negative: the number of the signal that ended it
        self.exited = asyncio.Event()
        self._adopted = False
        self._keeper: subprocess.Popen[bytes] | _Orphan
        self._mark = secrets.token_hex(8)
        self._scratch = Path(tempfile.gettempdir()) / f"powerband-{self._mark}"

    @classmethod
    async def adopt(cls, record: Mapping[str, Any], control: int) -> Process:
        """Return a process that an earlier supervisor started, from its `record` and its control socket."""
        command = Command(argv=tuple(record["argv"]))
        found = cls(command, log=Path(record["log"]), grace_s=record["grace_s"])
        found.pid, found._mark = record["pid"], record["mark"]
        found._scratch = Path(record["scratch"])
        found._keeper = _Orphan(record["keeper"])
        found._reader, found._writer = await asyncio.open_connection(sock=socket.socket(fileno=control))
        found._watcher = asyncio.create_task(found._watch())
        found._adopted = True
        return found

    @property
    def record(self) -> dict[str, Any]:
        """Return what `adopt` needs besides the control socket."""
        return {
            "argv": self.command.argv,
            "log": str(self.log),
            "grace_s": self.grace_s,
            "pid": self.pid,
            "mark": self._mark,
            "scratch": str(self._scratch),
            "keeper": self._keeper.pid,
        }

    @property
    def control(self) -> int:
        """Return the descriptor of the control socket; the process is killed when its last copy closes."""
        return int(self._writer.get_extra_info("socket").fileno())

    async def __aenter__(self) -> Process:
        if self._adopted:
            return self
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno()), str(self._scratch), str(self.log)]
            self._keeper = subprocess.Popen(
                [*argv, str(LOG_MAX_BYTES), *self.command.argv],
                env={**os.environ, **self.command.env, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *self.inherited],
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            first = (await self._reader.readline()).decode()
            if not first.startswith("pid "):
                reason = first.removeprefix("cannot ").strip() or "the keeper process exited"
                raise EngineFailed(
                    f"cannot run {self.command.argv[0]}: {reason}",
                    hint="check that the program exists and is executable; 'powerband doctor' lists engines",
                    failure="file_missing",
                )
            self.pid = int(first.split()[1])
        except BaseException:
            await self._close()
            raise
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(self.grace_s)

    async def _watch(self) -> None:
        """Wait for the exit status from the keeper; if the keeper was killed, kill what is left of the engine."""
        status = None
        while line := (await self._reader.readline()).decode():
            if line.startswith("exit "):
                status = line.split()[1]
        await asyncio.to_thread(self._keeper.wait)
        if status is None or status == "None":
            await asyncio.to_thread(_kill_descendants, self._keeper.pid, self._mark)
            shutil.rmtree(self._scratch, ignore_errors=True)
            self.exit_code = -signal.SIGKILL
        else:
            self.exit_code = int(status)
        self.exited.set()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, kill all of its processes after `grace_s`, and wait until they have ended."""
        if not self.exited.is_set():
            with contextlib.suppress(ConnectionError):
                self._writer.write(f"stop {grace_s}\n".encode())
                await self._writer.drain()
        await asyncio.shield(self._watcher)
        await self._close()

    async def _close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await asyncio.to_thread(self._keeper.wait)

    def memory_bytes(self) -> int:
        """Return the memory of the process tree; shared pages count once if the kernel reports PSS."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                full = process.memory_full_info()
                total += getattr(full, "pss", full.rss)
        return total

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process tree."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def owns_port(self, port: int) -> bool:
        """Return whether a process of the tree listens on the port; True if that is unknown."""
        try:
            for process in self._tree():
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        except (psutil.AccessDenied, NotImplementedError):
            return True
        except psutil.Error:
            return False
        return False

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []


class _Orphan:
    """A keeper whose parent has died: another process reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        """Return when the keeper has ended."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def _kill_descendants(session: int, mark: str) -> None:
    """Kill every process of the keeper's session, and processes in other sessions that have our mark."""
    for _ in range(100):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) == session or process.environ().get(_MARK) == mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    found.append(process)
        if not found:
            return
        psutil.wait_procs(found, timeout=0.1)
