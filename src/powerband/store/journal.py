"""A journal: notes that survive a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON that survive a kill: each is written whole, and forced to the disk, before it counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return what was noted; a line that was being written when the process died is forgotten."""
        if not self.path.is_file():
            return []
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def add(self, note: dict[str, Any]) -> None:
        """Note something."""
        with self.path.open("a") as stream:
            stream.write(json.dumps(note, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
