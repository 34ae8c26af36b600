"""The keeper: a parent process for an engine, which ends the engine when Powerband dies, and leaves nothing behind.

It runs as a script and uses only the standard library:

    keeper.py CONTROL_FD SCRATCH_FOLDER LOG_PATH LOG_MAX_BYTES ARGV...

The keeper leads a new session, is the subreaper of the engine's orphaned processes, gives the engine a private TMPDIR,
and writes its output to a log of bounded size. It receives `stop <grace seconds>` on the control socket, and sends
`pid <n>` and `exit <status>`. The socket closes when Powerband ends, for any reason; the keeper then kills the engine
and all its descendants. If the keeper is killed, the kernel kills the engine (PR_SET_PDEATHSIG).
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
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> Callable[[], None]:
    """Return what a child runs before its program, so that the kernel kills it when its parent ends."""

    def before_exec() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


class Log:
    """An append-only file that is rotated when it reaches its limit; both files take at most twice the limit."""

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


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def all_children() -> dict[int, list[int]]:
    """Return the children of every process, for kernels that do not list them; it reads a file of each process."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def descendants(root: int) -> list[int]:
    """Return all descendants of a process, from /proc."""
    known = None if Path(f"/proc/{root}/task/{root}/children").exists() else all_children()
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        direct = children_of(pid) if known is None else known.get(pid, [])
        found += direct
        queue += direct
    return found


def mapped(pid: int) -> set[str]:
    """Return the shared-memory files that a process maps."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line}
    return set()


def shared_memory(pids: list[int]) -> set[str]:
    """Return the shared-memory files that only these processes map; a killed process cannot remove its files."""
    ours = {path for pid in pids for path in mapped(pid) if not path.endswith(" (deleted)")}
    for entry in Path("/proc").glob("[0-9]*") if ours else ():
        if int(entry.name) not in pids:
            ours -= mapped(int(entry.name))
    return ours


def tracks_resources(pid: int) -> bool:
    """Return whether a process is Python's multiprocessing resource tracker."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Keeper:
    """Runs one engine, and kills and cleans up everything that it started."""

    def __init__(self, control: socket.socket, scratch: str, log: Log, argv: list[str]) -> None:
        self.control, self.scratch, self.log, self.argv = control, scratch, log, argv
        self.deadline: float | None = None
        self.status: int | None = None
        self.shared: set[str] = set()

    def run(self) -> None:
        """Start the engine, wait until it exits or must stop, then kill and clean up what is left."""
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
        self.send(f"pid {self.engine.pid}")
        assert self.engine.stdout is not None
        output = self.engine.stdout
        os.set_blocking(output.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, self.on_control)
            selector.register(wake_read, selectors.EVENT_READ, lambda: wake_read.recv(4096))
            selector.register(output, selectors.EVENT_READ, self.on_output)
            while not self.reap():
                wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.data() is False:
                        selector.unregister(key.fileobj)
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    break
        self.kill_all()
        self.on_output()
        self.send(f"exit {self.status}")

    def spawn(self) -> subprocess.Popen[bytes] | None:
        try:
            return subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": self.scratch},
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )
        except OSError as error:
            self.send(f"cannot {error}")
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

    def stop(self, grace_s: float) -> None:
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + grace_s)
        self.shared |= shared_memory(descendants(os.getpid()))
        assert self.engine is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.engine.pid, signal.SIGTERM)

    def reap(self) -> bool:
        """Reap ended children; return whether the engine's main process has ended."""
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
        """Kill every descendant until none is left; remove their shared memory and temporary files."""
        assert self.engine is not None
        pause_s, tracker_deadline = 0.001, time.monotonic() + 1.0
        for _ in range(2000):
            alive = descendants(os.getpid()) if sys.platform == "linux" else []
            self.shared |= shared_memory(alive) if alive else set()
            waiting = time.monotonic() < tracker_deadline
            for pid in alive:
                if waiting and tracks_resources(pid):
                    continue  # it removes the shared memory of the others, then exits
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not alive or not waiting:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.engine.pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        for path in self.shared:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(line.encode() + b"\n")


def main() -> None:
    """Parse the arguments and run the keeper."""
    fd, scratch, log_path, limit, *argv = sys.argv[1:]
    Path(scratch).mkdir(mode=0o700)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    Keeper(control, scratch, Log(log_path, int(limit)), argv).run()


if __name__ == "__main__":
    main()
