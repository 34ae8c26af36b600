"""Data that a proof reads and whose licence does not let this repository have a copy: fetched once into the cache.

    python3 proofs/fetch.py          fetch everything now

`POWERBAND_DATA` names a directory that has the files already; a file in it is used as it is.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 120


@dataclass(frozen=True)
class Source:
    """One file of a public archive, with the SHA-256 of both."""

    name: str
    licence: str
    url: str
    archive_sha256: str
    member: str
    sha256: str


WIKITEXT2 = Source(
    name="wikitext2/wiki.test.raw",
    licence="CC BY-SA 3.0",
    url="https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
    archive_sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    member="wikitext-2-raw/wiki.test.raw",
    sha256="173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
)


def fetch(source: Source) -> Path:
    """Return the path of a file; fetch and check it if it is not here."""
    if (own := os.environ.get("POWERBAND_DATA")) and (given := Path(own) / source.name).exists():
        return given
    cache = Path(os.environ.get("POWERBAND_CACHE") or Path.home() / ".cache" / "powerband")
    path = cache / "proofs" / "data" / source.name
    if not path.exists():
        print(f"fetch {source.url} ({source.licence})", file=sys.stderr)
        try:
            with urllib.request.urlopen(source.url, timeout=_TIMEOUT_S) as answer:
                archive = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            hint = f"put it at $POWERBAND_DATA/{source.name}"
            sys.exit(f"error: {source.url} cannot be fetched: {error}\nhint: {hint}")
        _check(archive, source.archive_sha256, source.url)
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            content = files.read(source.member)
        _check(content, source.sha256, source.member)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _check(content: bytes, sha256: str, name: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        sys.exit(f"error: {name} has SHA-256 {found}, expected {sha256}\nhint: the source has changed; do not use it")


if __name__ == "__main__":
    print(fetch(WIKITEXT2))
