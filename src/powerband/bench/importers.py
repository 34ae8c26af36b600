"""Results of other tools as measurements: `vllm bench serve --save-detailed`, guidellm's report, aiperf's records.

What they wrote down of each request is analysed as our own records are. How they sent the requests nobody watched: the
figures are theirs.
"""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powerband.bench import analysis
from powerband.core.measurement import Distribution, Level, Measurement, Timeline, Verdict
from powerband.core.workload import Workload
from powerband.errors import InputError

_FEWEST = 2


@dataclass(frozen=True)
class Request:
    """What a tool tells of one request that was answered; seconds."""

    start: float
    ttft: float | None
    tpot: float | None
    e2e: float
    prompt: int
    output: int


@dataclass(frozen=True)
class ImportedRun:
    """What a tool tells of one load."""

    tool: str
    requests: Sequence[Request]  # in the order in which they were sent
    failed: int

    @property
    def rate_per_s(self) -> float:
        """Return how many were sent in a second."""
        return (len(self.requests) - 1) / max(1e-9, self.requests[-1].start - self.requests[0].start)


def read(path: Path) -> Measurement:
    """Return another tool's result as a measurement."""
    try:
        text = path.read_text("utf-8")
        told = _told(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="check the path") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        told = []
    told = [
        replace(one, requests=sorted(one.requests, key=lambda sent: sent.start))
        for one in told
        if len(one.requests) >= _FEWEST
    ]
    if not told:
        raise InputError(
            f"{path} is no result that tells of each request",
            hint="give what 'vllm bench serve --save-detailed', guidellm (JSON) or aiperf (profile_export.jsonl) wrote",
        )
    return Measurement(
        name=path.stem,
        profile="sweep" if len(told) > 1 else "level",
        workload=_workload(told[0]),
        levels=tuple(map(_level, told)),
        provenance={"tool": told[0].tool, "file": path.name},
    )


def _told(text: str) -> list[ImportedRun]:
    lines = text.splitlines()
    if lines and "request_start_ns" in lines[0]:
        return [_aiperf(map(json.loads, filter(None, lines)))]
    data = json.loads(text)
    return [_guidellm(one) for one in data["benchmarks"]] if "benchmarks" in data else [_vllm(data)]


def _vllm(data: dict[str, Any]) -> ImportedRun:
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    found = []
    for start, ttft, gaps, prompt, output, error in zip(*(data[name] for name in columns), strict=True):
        if not error and output:
            tpot = sum(gaps) / (output - 1) if output > 1 else None
            found.append(Request(start, ttft, tpot, ttft + sum(gaps), prompt, output))
    return ImportedRun("vllm bench serve", found, sum(map(bool, data["errors"])))


def _guidellm(data: dict[str, Any]) -> ImportedRun:
    def one(row: dict[str, Any]) -> Request:
        return Request(
            row["request_start_time"],
            _seconds(row.get("time_to_first_token_ms")),
            _seconds(row.get("inter_token_latency_ms")),
            row["request_latency"],
            row["prompt_tokens"] or 0,
            row["output_tokens"] or 0,
        )

    rows = data["requests"]
    return ImportedRun("guidellm", [one(row) for row in rows["successful"]], len(rows.get("errored") or ()))


def _aiperf(rows: Iterable[dict[str, Any]]) -> ImportedRun:
    found, failed = [], 0
    for row in rows:
        metrics = row["metrics"]
        if row.get("error") or "request_latency" not in metrics:
            failed += 1
            continue

        def value(name: str, metrics: dict[str, Any] = metrics) -> Any:
            return metrics[name]["value"] if name in metrics else None

        found.append(
            Request(
                row["metadata"]["request_start_ns"] / 1e9,
                _seconds(value("time_to_first_token")),
                _seconds(value("inter_token_latency")),
                value("request_latency") / 1e3,
                int(value("input_sequence_length") or 0),
                int(value("output_sequence_length") or value("output_token_count") or 0),
            )
        )
    return ImportedRun("aiperf", found, failed)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _level(told: ImportedRun) -> Level:
    rows = told.requests
    window_s = max(1e-9, max(one.start + one.e2e for one in rows) - rows[0].start)
    sentence = f"measured by {told.tool}; how it sent them nobody watched"
    return Level(
        rate_per_s=told.rate_per_s,
        seeds=(),
        warmup_s=0.0,
        window_s=window_s,
        requests=len(rows) + told.failed,
        failed=told.failed,
        achieved_per_s=len(rows) / window_s,
        prompt_tokens_per_s=sum(one.prompt for one in rows) / window_s,
        output_tokens_per_s=sum(one.output for one in rows) / window_s,
        tokens_per_chunk=1.0,
        latencies=_latencies(rows),
        client={},
        timeline=Timeline(at_s=(), in_flight=()),
        verdicts=(Verdict(guard="origin", valid=True, sentence=sentence),),
    )


def _latencies(rows: Sequence[Request]) -> dict[str, Distribution]:
    of: dict[str, Callable[[Request], float | None]] = {
        "ttft": lambda one: one.ttft,
        "tpot": lambda one: one.tpot,
        "e2e": lambda one: one.e2e,
    }
    found = {}
    for name, value in of.items():
        values = array("d", (held for one in rows if (held := value(one)) is not None))
        if len(values) >= _FEWEST:
            found[name] = analysis.distribution(analysis.PerRequest(values))
    return found


def _workload(told: ImportedRun) -> Workload:
    """Return what can be said of the traffic: its rate, and the usual lengths."""
    prompt, output = (
        max(1, round(statistics.median(lengths)))
        for lengths in ([one.prompt for one in told.requests], [one.output for one in told.requests])
    )
    return Workload.model_validate(
        {
            "name": told.tool,
            "description": f"as far as {told.tool} tells",
            "arrivals": {"process": "poisson", "rate_per_s": min(told.rate_per_s, 1e6)},
            "prompt": {"shape": "fixed", "tokens": prompt},
            "output": {"shape": "fixed", "tokens": output},
        }
    )
