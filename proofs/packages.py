"""What the proofs of releases share: built packages, empty environments, and the programs that run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "deploy" / "release.py"
_OURS = ("PYTHONPATH", "POWERBAND_", "VIRTUAL_ENV", "PYTHONHOME")


@dataclass(frozen=True)
class Packages:
    """What `deploy/release.py build` wrote."""

    wheel: Path
    sdist: Path


def build(folder: Path, *, ref: str = "HEAD") -> Packages:
    """Build the wheel and the sdist of a commit."""
    argv = [sys.executable, str(RELEASE), "build", "--ref", ref, "--output", str(folder)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return Packages(next(folder.glob("*.whl")), next(folder.glob("*.tar.gz")))


@dataclass(frozen=True)
class Environment:
    """An environment without anything of this checkout."""

    home: Path

    def install(self, what: str) -> float:
        """Install a package with pip and without its cache; return the seconds."""
        began = time.monotonic()
        argv = [self.home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", what]
        done = subprocess.run(argv, env=clean(self.home), cwd=self.home, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return time.monotonic() - began

    def run(self, *args: str, program: str = "powerband", timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in its own directory."""
        argv = [str(self.home / "bin" / program), *args]
        return subprocess.run(
            argv, env=clean(self.home), cwd=self.home, capture_output=True, text=True, timeout=timeout
        )

    def bytes(self) -> int:
        """Return the size of its files."""
        files = (path for path in self.home.rglob("*") if path.is_file() and not path.is_symlink())
        return sum(os.lstat(path).st_size for path in files)


def environment(folder: Path, python: str = sys.executable) -> Environment:
    """Create an empty environment of an interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, env=clean(folder))
    return Environment(folder)


def clean(home: Path) -> dict[str, str]:
    """Return this process's environment variables without ours, with caches below `home`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    return kept | {"POWERBAND_CACHE": str(home / "cache"), "POWERBAND_STATE": str(home / "state"), "COLUMNS": "100"}


def interpreters() -> Iterator[tuple[str, str]]:
    """Yield version and path of every Python from 3.11 that is on PATH or that pyenv or uv installed."""
    homes = [Path(one) for one in os.environ["PATH"].split(":")]
    homes += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    homes += sorted((Path.home() / ".local" / "share" / "uv" / "python").glob("*/bin"))
    programs = [shutil.which(f"python3.{minor}", path=str(home)) for home in homes for minor in range(11, 20)]
    found = set()
    for program in [sys.executable, *(one for one in programs if one)]:
        identity = _identity(program)
        if identity and identity not in found:
            found.add(identity)
            yield identity.split()[0], program


def _identity(program: str) -> str:
    """Return version and home of an interpreter that can create environments; else an empty text."""
    code = (
        "import ensurepip, os, platform, sys, venv; print(platform.python_version(), os.path.realpath(sys.base_prefix))"
    )
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, env=clean(Path("/nonexistent")))
    return done.stdout.strip() if done.returncode == 0 else ""
