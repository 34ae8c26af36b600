"""Every proof begins with this: it runs in an environment that holds this checkout, and its result is kept.

A proof prints its figure as its last line and exits 0 where its claim holds. What it printed, with the date and the
machine, is written beside it as `<name>.txt`; a run with arguments is a quick look and writes nothing.
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
QUICK = len(sys.argv) > 1  # a part of the proof, or a small one: its result is not kept
_INSIDE = "POWERBAND_PROOF_PYTHON"


def _enter() -> None:
    """Run again with an interpreter that has this checkout, unless this one has it."""
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
_said: list[str] = []


def say(line: str = "") -> None:
    """Print a line of the result."""
    _said.append(line)
    print(line, flush=True)


def conclude(figure: str, *, holds: bool) -> NoReturn:
    """Print the figure last, keep the result, and exit by whether the claim holds."""
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
    (ROOT / "proofs" / f"{NAME}.txt").write_text("\n".join(head + _said) + "\n")
    sys.exit(0 if holds else 1)


def powerband(*args: str, timeout: float = 900) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the command line of this checkout to its end; return it, and who outlived it."""
    argv = [sys.executable, "-m", "powerband", *args]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        family, deadline = Family(process.pid), time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            family.look()
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
        code = process.wait()
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read()), family.alive()


class Family:
    """Everything that a process has started, seen by looking often; tells who outlived it."""

    def __init__(self, root: int) -> None:
        self.root, self.seen = root, set[Any]()

    def look(self) -> None:
        """Note who is below the root now."""
        import psutil

        with contextlib.suppress(psutil.Error):
            self.seen |= set(psutil.Process(self.root).children(recursive=True))

    def alive(self) -> list[str]:
        """Return who lives: of those seen, and of the sessions that they led."""
        import psutil

        led = {one.pid for one in self.seen}
        born_later = [one for one in psutil.process_iter() if _session(one.pid) in led]
        lines = []
        for one in {*self.seen, *born_later}:
            with contextlib.suppress(psutil.Error):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(one.cmdline())[:80])
        return lines


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
