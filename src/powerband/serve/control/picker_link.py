"""The supervisor's connection to the picker: it sends updates, keeps the picker's last report, and reconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from powerband.serve import control_channel

_RECONNECT_S = 0.02


class PickerLink:
    """A connection to `control.sock`; `on_connect` is called to send a new connection the whole state."""

    def __init__(self, socket: Path, *, on_connect: Callable[[], None]) -> None:
        self.socket, self.on_connect = socket, on_connect
        self.report: dict[str, Any] = {}  # the picker's last
        self.reported_at_s = 0.0  # by the monotonic clock
        self._writer: asyncio.StreamWriter | None = None

    @property
    def connected(self) -> bool:
        """Return whether messages reach a picker."""
        return self._writer is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; without a connection it is dropped, because the next connection gets the whole state."""
        if self._writer:
            control_channel.send(self._writer, message)

    async def run(self) -> None:
        """Connect, read the reports, and connect again whenever the connection ends, until cancelled."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self.socket)
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self.on_connect()
            try:
                while (report := await control_channel.receive(reader)) is not None:
                    self.report, self.reported_at_s = report, time.monotonic()
            finally:
                self._writer.close()
                self._writer = None
