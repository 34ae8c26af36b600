"""A journal: JSON lines that survive a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """An append-only file of JSON lines; each is flushed to disk before `add` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all entries; an incomplete last line, from a crash, is removed."""
        if not self.path.is_file():
            return []
        text = self.path.read_text()
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self.path.write_text(complete)
        return [json.loads(line) for line in complete.splitlines()]

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry."""
        with self.path.open("a") as stream:
            stream.write(json.dumps(entry, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
