"""Read the header of a GGUF file (version 2 or 3): key-value pairs and tensor names, no tensor data.

The file is untrusted: what is read, kept and counted of it is limited.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 4096  # longer arrays are vocabularies, of which only the length is read
MAX_PAIRS, MAX_TENSORS, MAX_DIMENSIONS = 65_536, 1_000_000, 8
MAX_NAME_BYTES, MAX_STRING_BYTES = 65_535, 2**24
MAX_ELEMENTS = 4 * 2**20  # of all arrays that are kept, and of an array of strings
MAX_BYTES = 256 * 2**20  # of everything that is read


class NotGguf(ValueError):
    """The bytes are not a GGUF header that this module can read."""


def read_header(stream: BinaryIO, *, vocabulary: bool = False) -> dict[str, Any]:
    """Return the key-value pairs; long arrays are replaced by `<key>.length` unless `vocabulary` is set."""
    reader = _Reader(stream, max_array=MAX_ELEMENTS if vocabulary else _MAX_ARRAY)
    if reader.take(4) != b"GGUF":
        raise NotGguf("it does not start with the bytes GGUF")
    try:
        version = reader.scalar("I")
        if version not in (2, 3):
            raise NotGguf(f"it is GGUF version {version}; only versions 2 and 3 are supported")
        tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
        if pairs > MAX_PAIRS or tensors > MAX_TENSORS:
            limits = f"at most {MAX_PAIRS:,} and {MAX_TENSORS:,}"
            raise NotGguf(f"it claims {pairs:,} header entries and {tensors:,} tensors; {limits} are read")
        header: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.string(MAX_NAME_BYTES)
            value = reader.value(reader.scalar("I"))
            if isinstance(value, _Length):
                header[f"{key}.length"] = value.count
            else:
                header[key] = value
        header["tied"] = not reader.has_tensor("output.weight", tensors)
        return header
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
        raise NotGguf(f"its header is truncated or corrupt ({type(error).__name__})") from None


class _Length:
    def __init__(self, count: int) -> None:
        self.count = count


class _Reader:
    """Reads values from a stream; raises NotGguf where a value is over a limit."""

    def __init__(self, stream: BinaryIO, *, max_array: int) -> None:
        self._stream, self._max_array = stream, max_array
        self._bytes, self._elements = MAX_BYTES, MAX_ELEMENTS

    def take(self, count: int) -> bytes:
        self._bytes -= count
        if self._bytes < 0:
            raise NotGguf(f"its header has more than {MAX_BYTES:,} bytes")
        return self._stream.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self, max_bytes: int = MAX_STRING_BYTES) -> str:
        return self._string_bytes(max_bytes).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        return self._array() if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def has_tensor(self, wanted: str, count: int) -> bool:
        """Return whether one of the next tensors has this name."""
        found = False
        for _ in range(count):
            found = self._string_bytes(MAX_NAME_BYTES) == wanted.encode() or found
            dimensions = self.scalar("I")
            if dimensions > MAX_DIMENSIONS:
                raise NotGguf(f"a tensor has {dimensions} dimensions; at most {MAX_DIMENSIONS} are read")
            self.take(8 * dimensions + 4 + 8)  # dimensions, type and offset
        return found

    def _array(self) -> list[Any] | _Length:
        inner, count = self.scalar("I"), self.scalar("Q")
        strings = inner == _STRING
        size = 8 if strings else struct.calcsize("<" + _SCALARS[inner])
        if count > (MAX_ELEMENTS if strings else 2**40 // size):
            raise NotGguf(f"an array in its header has {count:,} elements")
        if count > self._max_array:
            if strings:
                for _ in range(count):
                    self._stream.seek(self._string_length(MAX_STRING_BYTES), 1)
            else:
                self._stream.seek(size * count, 1)
            return _Length(count)
        self._elements -= count
        if self._elements < 0:
            raise NotGguf(f"the arrays in its header have more than {MAX_ELEMENTS:,} elements")
        if strings:
            return [self.string() for _ in range(count)]
        return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(size * count)))

    def _string_bytes(self, max_bytes: int) -> bytes:
        length = self._string_length(max_bytes)
        data = self.take(length)
        if len(data) != length:
            raise NotGguf("a string in its header runs past the end of the file")
        return data

    def _string_length(self, max_bytes: int) -> int:
        length: int = self.scalar("Q")
        if length > max_bytes:
            raise NotGguf(f"a string in its header has {length:,} bytes; at most {max_bytes:,} are read")
        return length
