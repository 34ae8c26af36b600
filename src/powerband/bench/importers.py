"""Import results of other tools as measurements: `vllm bench serve --save-detailed`, guidellm (JSON), aiperf (JSONL).

Per-request values are analysed in the same way as Powerband's own records. The guards cannot check how the tool sent
the requests.
"""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powerband import untrusted
from powerband.bench import analysis
from powerband.core.measurement import Distribution, Level, Measurement, Timeline, Verdict
from powerband.core.workload import Workload
from powerband.errors import InputError

_MIN_REQUESTS = 2
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Request:
    """One answered request as a tool recorded it; times in seconds."""

    start: float
    ttft: float | None
    tpot: float | None
    e2e: float
    prompt: int
    output: int


@dataclass(frozen=True)
class ImportedRun:
    """The results of a tool at one load."""

    tool: str
    requests: Sequence[Request]  # by send time
    failed: int

    @property
    def rate_per_s(self) -> float:
        """Return the mean rate at which requests were sent."""
        return (len(self.requests) - 1) / max(1e-9, self.requests[-1].start - self.requests[0].start)


def read(path: Path) -> Measurement:
    """Return the result file of another tool as a measurement."""
    try:
        parsed = _parse(untrusted.text(path, max_bytes=untrusted.MAX_RESULTS_BYTES))
        runs = [
            replace(run, requests=sorted(run.requests, key=lambda request: request.start))
            for run in parsed
            if len(run.requests) >= _MIN_REQUESTS
        ]
    except (*_MALFORMED, RecursionError):
        runs = []
    if not runs:
        raise InputError(
            f"{path} contains no per-request results",
            hint="use output of 'vllm bench serve --save-detailed', guidellm (JSON) or aiperf (profile_export.jsonl)",
        )
    try:
        return _measurement(path, runs)
    except _MALFORMED as error:
        raise InputError(f"impossible numbers in {path}: {error}"[:500], hint="export the results again") from None


def _measurement(path: Path, runs: Sequence[ImportedRun]) -> Measurement:
    return Measurement(
        name=path.stem,
        profile="sweep" if len(runs) > 1 else "level",
        workload=_workload(runs[0]),
        levels=tuple(map(_level, runs)),
        provenance={"tool": runs[0].tool, "file": path.name},
    )


def _parse(text: str) -> list[ImportedRun]:
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


def _level(run: ImportedRun) -> Level:
    rows = run.requests
    window_s = max(1e-9, max(one.start + one.e2e for one in rows) - rows[0].start)
    sentence = f"measured by {run.tool}; the guards did not check how it sent requests"
    return Level(
        rate_per_s=run.rate_per_s,
        seeds=(),
        warmup_s=0.0,
        window_s=window_s,
        requests=len(rows) + run.failed,
        failed=run.failed,
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
        values = array("d", (latency for one in rows if (latency := value(one)) is not None))
        if len(values) >= _MIN_REQUESTS:
            found[name] = analysis.distribution(analysis.PerRequest(values))
    return found


def _workload(run: ImportedRun) -> Workload:
    """Return an approximate workload: the mean rate and the median lengths."""
    prompt, output = (
        max(1, round(statistics.median(lengths)))
        for lengths in ([one.prompt for one in run.requests], [one.output for one in run.requests])
    )
    return Workload.model_validate(
        {
            "name": run.tool,
            "description": f"mean rate and median lengths of a {run.tool} run",
            "arrivals": {"process": "poisson", "rate_per_s": min(run.rate_per_s, 1e6)},
            "prompt": {"shape": "fixed", "tokens": prompt},
            "output": {"shape": "fixed", "tokens": output},
        }
    )
