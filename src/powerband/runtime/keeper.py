"""The keeper: a small process between Powerband and an engine that outlives neither.

Run as a script with the standard library alone:

    keeper.py CONTROL_FD SCRATCH_FOLDER LOG_PATH LOG_MAX_BYTES ARGV...

It leads a session of its own, adopts whatever the engine orphans, gives it a folder of its own for temporary files,
and writes its output to a log of bounded size. The control socket carries `stop <grace seconds>` in, and `pid <n>` and
`exit <status>` out. When the socket closes, Powerband is dead, however it died: the engine and all its descendants are
killed at once. When the keeper itself is killed, the kernel kills the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Log:
    """An append-only file that is rotated once it is full: at most twice its limit on disk."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.limit = Path(path), limit
        self.file = self.path.open("ab", buffering=0)
        self.size = self.file.tell()

    def write(self, data: bytes) -> None:
        while data:
            if self.size >= self.limit:
                self.file.close()
                self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
                self.file = self.path.open("ab", buffering=0)
                self.size = 0
            part, data = data[: self.limit - self.size], data[self.limit - self.size :]
            with contextlib.suppress(OSError):  # a full disk must not kill a serving engine
                self.file.write(part)
            self.size += len(part)


def descendants(root: int) -> list[int]:
    """Return every process below `root`, from the kernel's own table."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Return the shared-memory files that only these processes map: a killed process cannot remove its own."""
    ours, others = set(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (entry / "maps").read_text(errors="replace")
            files = {line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line}
            if int(entry.name) in pids:
                ours |= files
            else:
                others |= files
    return {path for path in ours - others if not path.endswith(" (deleted)")}


def tracks_resources(pid: int) -> bool:
    """Tell whether a process is Python's tracker of shared memory and semaphores."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Keeper:
    """Own one engine until it is gone."""

    def __init__(self, control: socket.socket, scratch: str, log: Log, argv: list[str]) -> None:
        self.control, self.scratch, self.log, self.argv = control, scratch, log, argv
        self.deadline: float | None = None
        self.status: int | None = None
        self.shared: set[str] = set()

    def run(self) -> None:
        """Start the engine, wait for it or for the order to end it, leave nothing behind."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(3.0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.engine = self.spawn()
        if self.engine is None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            return
        self.tell(f"pid {self.engine.pid}")
        assert self.engine.stdout is not None
        output = self.engine.stdout
        os.set_blocking(output.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, self.on_control)
            selector.register(wake_read, selectors.EVENT_READ, lambda: wake_read.recv(4096))
            selector.register(output, selectors.EVENT_READ, self.on_output)
            while not self.gone():
                wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.data() is False:
                        selector.unregister(key.fileobj)
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    break
        self.kill_all()
        self.on_output()
        self.tell(f"exit {self.status}")

    def spawn(self) -> subprocess.Popen[bytes] | None:
        keeper = os.getpid()

        def before_exec() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)

        try:
            return subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": self.scratch},
                process_group=0,
                preexec_fn=before_exec,
            )
        except OSError as error:
            self.tell(f"cannot {error}")
            return None

    def on_control(self) -> bool:
        try:
            data = self.control.recv(4096)
        except OSError:
            data = b""
        if not data:
            self.deadline = time.monotonic()
            return False
        for line in data.decode().splitlines():
            if line.startswith("stop "):
                self.stop(float(line.split()[1]))
        return True

    def on_output(self) -> bool:
        assert self.engine is not None and self.engine.stdout is not None
        while True:
            try:
                data = os.read(self.engine.stdout.fileno(), 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.log.write(data)

    def stop(self, grace: float) -> None:
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + grace)
        self.shared |= shared_memory(descendants(os.getpid()))
        assert self.engine is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.engine.pid, signal.SIGTERM)

    def gone(self) -> bool:
        """Reap whatever has ended; True once the engine's first process has."""
        assert self.engine is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return self.status is not None
            if pid == self.engine.pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.engine.returncode = self.status

    def kill_all(self) -> None:
        """Kill every descendant until none is left, and remove the shared memory and the files that they leave."""
        assert self.engine is not None
        pause, patience = 0.001, time.monotonic() + 1.0
        for _ in range(2000):
            below = descendants(os.getpid()) if sys.platform == "linux" else []
            self.shared |= shared_memory(below) if below else set()
            waiting = time.monotonic() < patience
            for pid in below:
                if waiting and tracks_resources(pid):
                    continue  # it removes what the others leave, and ends by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not below or not waiting:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.engine.pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        for path in self.shared:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(line.encode() + b"\n")


def main() -> None:
    """Read the arguments and keep."""
    fd, scratch, log_path, limit, *argv = sys.argv[1:]
    Path(scratch).mkdir(mode=0o700)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    Keeper(control, scratch, Log(log_path, int(limit)), argv).run()


if __name__ == "__main__":
    main()
