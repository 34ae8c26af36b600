"""Read the text of files that others wrote: only regular files, up to a size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from powerband.errors import InputError

MAX_DOCUMENT_BYTES = 32 * 2**20
MAX_CONFIG_BYTES = 64 * 2**20  # config.json and the index of the weights, which has 10 MB for a thousand experts
MAX_TOKENIZER_BYTES = 128 * 2**20
MAX_RESULTS_BYTES = 2**30  # of another tool, with every request; traces and datasets
MAX_LINE_BYTES = 16 * 2**20


def text(path: Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the text of a file; raise InputError if it is missing, special, too large or not UTF-8."""
    try:
        data = data_of(path, max_bytes=max_bytes)
        return data.decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"file {path} not found", hint="check the path") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL byte
        raise InputError(f"{path} cannot be read: {error}", hint="give a text file in UTF-8") from None


def lines(path: Path, *, max_bytes: int = MAX_RESULTS_BYTES) -> Iterator[str]:
    """Yield the lines of a file without reading it whole; raise InputError as `text` does, and for an endless line."""
    try:
        with _opened(path, max_bytes) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{path} has a line over {MAX_LINE_BYTES:,} bytes", hint="give the right file")
                yield line.decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"file {path} not found", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="give a text file in UTF-8") from None


def data_of(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file; raise OSError, or InputError for a special file or one over the limit."""
    with _opened(path, max_bytes) as stream:
        data = bytearray()
        while part := stream.read(2**20):  # the size of a file in /proc is 0, and a file can grow
            data += part
            if len(data) > max_bytes:
                raise _too_large(path, len(data), max_bytes)
    return bytes(data)


def _opened(path: Path, max_bytes: int) -> BinaryIO:
    # a pipe would wait for a writer
    stream = os.fdopen(os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
            raise InputError(f"{path} is {kind}, not a file", hint="write its content to a file, and give that")
        if found.st_size > max_bytes:
            raise _too_large(path, found.st_size, max_bytes)
    except BaseException:
        stream.close()
        raise
    return stream


def _too_large(path: Path, size: int, limit: int) -> InputError:
    return InputError(f"{path} has {size:,} bytes; the limit is {limit:,}", hint="give the right file")
