"""Read the header of a GGUF file (version 2 or 3): key-value pairs and tensor names, no tensor data."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 4096  # longer arrays are vocabularies, of which only the length is read


class NotGguf(ValueError):
    """The bytes are not a GGUF header that this module can read."""


def read_header(stream: BinaryIO, *, vocabulary: bool = False) -> dict[str, Any]:
    """Return the key-value pairs; long arrays are replaced by `<key>.length` unless `vocabulary` is set."""
    if stream.read(4) != b"GGUF":
        raise NotGguf("it does not start with the bytes GGUF")
    try:
        version = _scalar(stream, "I")
        if version not in (2, 3):
            raise NotGguf(f"it is GGUF version {version}; only versions 2 and 3 are supported")
        tensors, pairs = _scalar(stream, "Q"), _scalar(stream, "Q")
        if pairs > 1_000_000 or tensors > 10_000_000:
            raise NotGguf(f"it claims {pairs} header entries and {tensors} tensors")
        header: dict[str, Any] = {}
        for _ in range(pairs):
            key = _string(stream)
            value = _value(stream, _scalar(stream, "I"), max_length=2**32 if vocabulary else _MAX_ARRAY)
            if isinstance(value, _Length):
                header[f"{key}.length"] = value.count
            else:
                header[key] = value
        header["tied"] = "output.weight" not in _tensor_names(stream, tensors)
        return header
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
        raise NotGguf(f"its header is truncated or corrupt ({type(error).__name__})") from None


def _tensor_names(stream: BinaryIO, count: int) -> set[str]:
    names = set()
    for _ in range(count):
        names.add(_string(stream))
        stream.seek(8 * _scalar(stream, "I") + 4 + 8, 1)  # dimensions, type and offset
    return names


class _Length:
    def __init__(self, count: int) -> None:
        self.count = count


def _value(stream: BinaryIO, kind: int, *, max_length: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _scalar(stream, _SCALARS[kind])
    inner, count = _scalar(stream, "I"), _scalar(stream, "Q")
    if inner == _STRING:
        if count > max_length:
            for _ in range(count):
                _skip(stream, _scalar(stream, "Q"))
            return _Length(count)
        return [_string(stream) for _ in range(count)]
    size = struct.calcsize("<" + _SCALARS[inner])
    if count > max_length:
        _skip(stream, size * count)
        return _Length(count)
    return [_scalar(stream, _SCALARS[inner]) for _ in range(count)]


def _scalar(stream: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0]


def _string(stream: BinaryIO) -> str:
    length = _scalar(stream, "Q")
    data = stream.read(min(length, 2**24))
    if len(data) != length:
        raise NotGguf("a string in its header runs past the end of the file")
    return data.decode("utf-8", "replace")


def _skip(stream: BinaryIO, count: int) -> None:
    if count > 2**40:
        raise NotGguf("an array in its header is impossibly long")
    stream.seek(count, 1)
