"""Messages between the supervisor and the picker: JSON objects of any size, each after its length in 8 bytes."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct(">Q")


def send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Write a message; the connection's buffer holds it until the other side reads."""
    data = json.dumps(message).encode()
    writer.write(_LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or None if the other side has closed the connection."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return found
