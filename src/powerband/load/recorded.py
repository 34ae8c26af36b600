"""Read recorded traffic and datasets, which others wrote: Mooncake JSONL, Azure CSV, JSON lines."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from powerband import untrusted
from powerband.core import plain_data
from powerband.core.workload import Trace
from powerband.errors import InputError

_MAX_TOKENS, MAX_ID = 2**31, 2**64
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error)  # rows of another kind


def request_rows(trace: Trace, base: Path) -> Iterator[tuple[float, int, int, Sequence[int]]]:
    """Yield arrival time, prompt tokens, output tokens and block ids; raise InputError for an impossible row."""
    path = base / trace.path
    rows: Iterator[dict[str, Any]] = csv.DictReader(untrusted.lines(path)) if path.suffix == ".csv" else json_rows(path)
    read, number = _csv_row if path.suffix == ".csv" else _mooncake, 0
    try:
        for row in rows:
            number += 1
            yield _checked(*read(row))
    except MALFORMED as error:
        hint = "use Mooncake's JSONL, Azure's CSV, or a CSV with columns arrived_s,prompt_tokens,output_tokens"
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: request {number} is not usable: {problem}"[:500], hint=hint) from None


def _csv_row(row: dict[str, Any]) -> tuple[float, int, int, Sequence[int]]:
    if "arrived_s" in row:
        return float(row["arrived_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), ()
    arrived = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
    return arrived.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _mooncake(row: dict[str, Any]) -> tuple[float, int, int, Sequence[int]]:
    return row["timestamp"] / 1000, row["input_length"], row["output_length"], row.get("hash_ids", ())


def _checked(at_s: float, prompt: int, output: int, ids: Sequence[int]) -> tuple[float, int, int, Sequence[int]]:
    if not math.isfinite(at_s) or not 0 <= prompt <= _MAX_TOKENS or not 0 <= output <= _MAX_TOKENS:
        raise ValueError(f"{prompt} prompt and {output} output tokens; at most {_MAX_TOKENS:,}")
    if not all(isinstance(one, int) and 0 <= one < MAX_ID for one in ids):
        raise ValueError("a block id is not a number from 0 to 2^64")
    return at_s, prompt, output, ids


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; raise InputError for another line."""
    for number, line in enumerate(untrusted.lines(path), 1):
        if line.strip():
            try:
                yield plain_data.parse_json_object(line)
            except ValueError as error:
                hint = "every line must be a JSON object"
                raise InputError(f"{path}:{number}: this line is not JSON: {error}"[:500], hint=hint) from None
