"""SHA-256 digests of files; that of a large file is kept, and read again only if the file has changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from powerband.runtime import installations

_LARGE_BYTES = 1_000_000  # smaller files are read each time
_MAX_KEPT = 10_000


def of(path: Path) -> bytes:
    """Return the digest of one file."""
    found = path.stat()
    if found.st_size < _LARGE_BYTES:
        return _read(path)
    # inode, size and times: a file that was replaced or written to differs in one of them
    key = f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
    kept = _kept()
    if key in kept:
        return bytes.fromhex(kept[key])
    digest = _read(path)
    newest = dict(list({**_kept(), key: digest.hex()}.items())[-_MAX_KEPT:])
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        partial = _file().with_suffix(f".{os.getpid()}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(newest))
        partial.replace(_file())
    return digest


def of_all(paths: Iterable[Path]) -> str:
    """Return one digest of several files, in this order."""
    total = hashlib.sha256()
    for path in paths:
        total.update(of(path))
    return total.hexdigest()


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _kept() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    return installations.cache_root() / "digests.json"
