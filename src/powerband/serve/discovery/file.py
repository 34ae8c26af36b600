"""Endpoints from a file: a YAML list of addresses, or of mappings with `address` and optionally `name`, `recipe`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from powerband.errors import InputError
from powerband.serve.discovery import Discovered, OnChange

_POLL_S = 0.5
_KEYS = {"address", "name", "recipe"}


@dataclass(frozen=True)
class EndpointsFile:
    """A file that is read again when it changes."""

    path: Path

    async def watch(self, on_change: OnChange) -> None:
        """Report the endpoints of the file; an invalid file changes nothing."""
        last = ""
        while True:
            try:
                if (text := self.path.read_text()) != last:
                    last = text
                    on_change(read(text, source=str(self.path)))
            except (InputError, OSError) as error:
                print(f"error: endpoints not loaded: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_POLL_S)


def read(text: str, *, source: str) -> list[Discovered]:
    """Return the endpoints of a file's text."""
    try:
        rows = yaml.safe_load(text) or []
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not valid YAML: {error}", hint="write one '- IP:PORT' on each line") from None
    if not isinstance(rows, list):
        raise InputError(f"{source} is not a list", hint="write one '- IP:PORT' on each line")
    found = [_endpoint(row, source) for row in rows]
    return list({one.name: one for one in found}.values())


def _endpoint(row: Any, source: str) -> Discovered:
    data = {"address": row} if isinstance(row, str) else row
    if not isinstance(data, dict) or not data.keys() <= _KEYS or not is_address(data.get("address")):
        raise InputError(
            f"{source}: {row!r} is not an endpoint", hint="an endpoint is 'IP:PORT', or has the key 'address'"
        )
    return Discovered(str(data.get("name", data["address"])), data["address"], recipe=str(data.get("recipe", "")))


def is_address(text: object) -> bool:
    """Tell whether a text is HOST:PORT with a valid port."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536
