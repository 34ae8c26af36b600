"""The capture of traffic: a JSON line per finished request, in a file of bounded size with one older file beside it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerband.core.prefix_hash import CHARS_PER_TOKEN
from powerband.serve.router.redaction import redacted
from powerband.serve.router.scheduler import RequestContext, RequestOutcome

_MAX_BYTES, _MAX_BLOCK_IDS = 256 * 2**20, 1_000_000  # of one file
_TAIL_BYTES = 4 * 2**20  # holds the last line


def rotated(path: Path) -> Path:
    """Return the file that a full capture file is renamed to."""
    return path.with_name(path.name + ".1")


class TrafficCapture:
    """Appends requests to a file. Its block ids are sequential: the file contains no hash of a prompt."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, max_block_ids: int = _MAX_BLOCK_IDS) -> None:
        self.path, self.max_bytes, self.max_block_ids = path, max_bytes, max_block_ids
        self.rotations = self.lost = 0  # full files that were renamed; requests that could not be written
        self._first_id, self._ids = next_id(path), dict[int, int]()
        self._stream = path.open("a", buffering=1)

    def add(self, context: RequestContext, outcome: RequestOutcome) -> None:
        """Append arrival time, lengths, block ids and latencies of a request; redacted text if that is captured."""
        profile = context.queued.profile
        arrived = time.time() - (time.monotonic() - context.queued.arrived_s)
        row: dict[str, Any] = {
            "timestamp": round(arrived * 1000),
            "input_length": outcome.prompt_tokens or round(profile.prompt_tokens),
            "output_length": outcome.output_tokens,
            "hash_ids": self._numbered(profile.fine_blocks),
            "characters": round(profile.prompt_tokens * CHARS_PER_TOKEN),
            "turns": profile.turns,
            "model": context.model.name,
            "recipe": context.model.recipe,
            "ttft_s": outcome.ttft_s,
            "tpot_s": outcome.tpot_s,
            "e2e_s": outcome.e2e_s,
            "next_id": self._first_id + len(self._ids),
        }
        if profile.messages:
            row["messages"] = [{"role": role, "content": redacted(content)} for role, content in profile.messages]
        try:
            self._stream.write(json.dumps(row) + "\n")
            if self._stream.tell() > self.max_bytes or len(self._ids) > self.max_block_ids:
                self._rotate()
        except (OSError, ValueError) as error:  # a full disk; ValueError: the file could not be opened again
            if not self.lost:
                print(f"warning: traffic is not captured: {error}", file=sys.stderr, flush=True)
            self.lost += 1
            self.close()
            with contextlib.suppress(OSError):
                self._stream = self.path.open("a", buffering=1)

    def close(self) -> None:
        """Close the file, without what a full disk could not take."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _numbered(self, blocks: Sequence[int]) -> list[int]:
        return [self._ids.setdefault(one, self._first_id + len(self._ids)) for one in blocks]

    def _rotate(self) -> None:
        """Rename the full file, replacing an older one, and begin a new file with new block ids."""
        self.close()
        self.path.replace(rotated(self.path))
        self._stream = self.path.open("a", buffering=1)
        self._first_id, self._ids = self._first_id + len(self._ids), {}
        self.rotations += 1


def next_id(path: Path) -> int:
    """Return the first block id that the capture files do not use yet, from the last lines of the newer one."""
    for file in (path, rotated(path)):
        if file.exists() and (lines := _last_lines(file)):
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
            largest: int = max(max(int(row.get("next_id", 0)) - 1, *row["hash_ids"], -1) for row in rows)
            return largest + 1
    return 0


def _last_lines(path: Path) -> list[str]:
    """Return the complete lines in the last part of a file."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and line.startswith("{")]
