"""Fetch an archive with a known digest, and unpack the directory of its program. `engine install` runs it as a program.

python -m powerband.runtime.archives FILE_OR_URL --sha256 DIGEST --program NAME --output DIR
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 2**20
_TIMEOUT_S = 30
_MAX_BYTES = 8 * 2**30  # of the archive, and of what it unpacks to
_MAX_FILES = 20_000
_REPORT_INTERVAL_S = 0.5


def unpack(source: str, *, sha256: str, program: str, output: Path) -> None:
    """Move the directory of an archive's program to `output`; nothing is unpacked if the digest is wrong."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        archive, unpacked = Path(folder) / "archive", Path(folder) / "unpacked"
        found = _fetch(source, archive)
        if found != sha256.lower():
            sys.exit(f"{source} has SHA-256 {found}, expected {sha256}")
        try:
            with tarfile.open(archive) as files:
                files.extractall(unpacked, members=_limited(files), filter="data")
        except (tarfile.TarError, EOFError) as error:
            sys.exit(f"{source} cannot be unpacked: {error}")
        programs = sorted((one for one in unpacked.rglob(program) if one.is_file()), key=lambda one: len(one.parts))
        if not programs:
            sys.exit(f"{source} contains no file {program}")
        shutil.move(programs[0].parent, output)


def _fetch(source: str, target: Path) -> str:
    """Copy a file or download a URL; print the progress in make's form, and return the SHA-256."""
    digest, done, reported_s = hashlib.sha256(), 0, 0.0
    try:
        stream, size = _opened(source)
        with stream, target.open("wb") as copy:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
                done += len(chunk)
                if done > _MAX_BYTES:
                    sys.exit(f"{source} is larger than {_MAX_BYTES} bytes")
                if size and time.monotonic() - reported_s >= _REPORT_INTERVAL_S:
                    reported_s = time.monotonic()
                    print(f"[{done * 100 // size:3d}%]", flush=True)
    except (OSError, ValueError) as error:  # URLError is an OSError
        sys.exit(f"{source} cannot be read: {error}")
    return digest.hexdigest()


def _opened(source: str) -> tuple[BinaryIO, int]:
    """Return a stream of a file or URL, and its size; zero: unknown."""
    if source.startswith(("https://", "http://")):
        answer = urllib.request.urlopen(source, timeout=_TIMEOUT_S)
        return answer, int(answer.headers.get("Content-Length") or 0)
    path = Path(source).expanduser()
    return path.open("rb"), path.stat().st_size


def _limited(files: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members, and stop at limits of number and size."""
    size = 0
    for number, member in enumerate(files, start=1):
        size += member.size
        if number > _MAX_FILES or size > _MAX_BYTES:
            raise tarfile.TarError(f"it has more than {_MAX_FILES} files or {_MAX_BYTES} bytes")
        yield member


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m powerband.runtime.archives")
    parser.add_argument("source")
    for option in ("sha256", "program", "output"):
        parser.add_argument(f"--{option}", required=True)
    args = parser.parse_args()
    unpack(args.source, sha256=args.sha256, program=args.program, output=Path(args.output))


if __name__ == "__main__":
    main()
