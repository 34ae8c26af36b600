"""Imported first by every proof: runs it in an environment with this checkout, and writes its result.

A proof prints its figure as the last line and exits 0 if its claim holds. Its output, with the date and the machine, is
written to `<name>.txt`; a run with arguments is a partial run and writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
NAME = Path(sys.argv[0]).name
QUICK = len(sys.argv) > 1  # a partial or small run: its result is not written
_INSIDE = "POWERBAND_PROOF_PYTHON"


def _enter() -> None:
    """Re-execute the proof with an interpreter that has this checkout installed, unless this one has."""
    if os.environ.get(_INSIDE) or _has_checkout():
        return
    cache = Path(os.environ.get("POWERBAND_CACHE") or Path.home() / ".cache" / "powerband")
    home = cache / "proofs" / f"python-{platform.python_version()}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[dev]"]
    subprocess.run(install, check=True, stdout=sys.stderr)
    os.execve(python, [str(python), *sys.argv], {**os.environ, _INSIDE: "1"})


def _has_checkout() -> bool:
    try:
        import pytest  # noqa: F401

        import powerband
    except ImportError:
        return False
    return Path(powerband.__file__).is_relative_to(ROOT)


_enter()
sys.path.insert(0, str(ROOT / "tests"))
_lines: list[str] = []


def say(line: str = "") -> None:
    """Print a line and add it to the result."""
    _lines.append(line)
    print(line, flush=True)


def conclude(figure: str, *, holds: bool) -> NoReturn:
    """Print the figure, write the result, and exit with 0 if the claim holds, else 1."""
    say(figure)
    from powerband.core.units import about_bytes
    from powerband.runtime import devices

    host = devices.this_host()
    machine = f"{host.cpu_name}, {len(host.cores)} cores, {about_bytes(host.memory_bytes)}, {platform.system()}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    verdict = "holds" if holds else "DOES NOT HOLD"
    if QUICK:
        sys.exit(0 if holds else 1)
    head = [f"proof:   {NAME}", f"date:    {when}", f"machine: {machine}", f"verdict: {verdict}", ""]
    (ROOT / "proofs" / f"{NAME}.txt").write_text("\n".join(head + _lines) + "\n")
    sys.exit(0 if holds else 1)


def powerband(*args: str, timeout: float = 900) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a `powerband` command of this checkout; return it, and the processes that outlived it."""
    argv = [sys.executable, "-m", "powerband", *args]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        descendants, deadline = Descendants(process.pid), time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            descendants.sample()
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
        code = process.wait()
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read()), descendants.alive()


class Descendants:
    """The descendants of a process, collected by frequent sampling."""

    def __init__(self, root: int) -> None:
        self.root, self.seen = root, set[Any]()

    def sample(self) -> None:
        """Add the current descendants of the root."""
        import psutil

        with contextlib.suppress(psutil.Error):
            self.seen |= set(psutil.Process(self.root).children(recursive=True))

    def alive(self) -> list[str]:
        """Return the command lines of running processes: those seen, and those in sessions that they lead."""
        import psutil

        leaders = {one.pid for one in self.seen}
        started_later = [one for one in psutil.process_iter() if _session(one.pid) in leaders]
        lines = []
        for one in {*self.seen, *started_later}:
            with contextlib.suppress(psutil.Error):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(one.cmdline())[:80])
        return lines


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
