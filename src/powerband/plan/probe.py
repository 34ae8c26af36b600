"""Short probes of a running engine: bursts of equal requests that isolate single kinds of steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from powerband import metrics
from powerband.core.engine import EngineSettings
from powerband.core.records import Records
from powerband.core.workload import Workload
from powerband.errors import InvalidMeasurement
from powerband.load import generator, prompts, tokens
from powerband.load.wire import Target
from powerband.runtime import model_files
from powerband.runtime.replica import Replica

_ROUNDS = 5  # repeated, because a machine's speed drifts
_MAX_S = 420.0
_MIN_RESULTS = 6


@dataclass(frozen=True)
class Probe:
    """A burst of equal requests that are sent at once."""

    concurrency: int
    prompt: int
    output: int


# Concurrency 1 covers prompt lengths and context lengths; higher concurrency covers the cost of a batch.
PROBES = (
    Probe(1, 32, 32), Probe(1, 128, 16), Probe(1, 384, 16), Probe(1, 1024, 24),
    Probe(2, 32, 32), Probe(3, 32, 32), Probe(4, 32, 32), Probe(6, 32, 32), Probe(8, 32, 32), Probe(16, 32, 32),
    Probe(2, 384, 24), Probe(4, 128, 24), Probe(8, 128, 24),
)  # fmt: skip
# Closed loops with requests of mixed lengths show by how much steps under mixed load differ from those of a burst.
MIXED_LENGTHS = {"prompt": {"shape": "lognormal", "median": 80, "p95": 300, "max": 480},
                 "output": {"shape": "lognormal", "median": 24, "p95": 64, "max": 96}}  # fmt: skip
MIXED_CONCURRENCY = (2, 4, 8)
_REQUESTS_PER_SLOT = 6  # of a closed loop, in each round
MAX_CONTEXT = max(one.prompt + one.output for one in PROBES) + 512  # the margin is for a chat template
MAX_CONCURRENCY = max(one.concurrency for one in PROBES)


@dataclass(frozen=True)
class ProbeResult:
    """The latencies of a burst: TTFT of the slowest request, and the mean duration of a full decode step."""

    probe: Probe
    ttft_s: float
    step_s: float


@dataclass(frozen=True)
class ConcurrentProbe:
    """A closed loop with requests of mixed lengths, and its total duration."""

    concurrency: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    tpot_s: tuple[float, ...] = ()  # of the answers of two tokens or more


async def probe(
    replica: Replica,
    settings: EngineSettings,
    *,
    report: Callable[[int, ProbeResult], None] = lambda *_: None,
    max_s: float = _MAX_S,
) -> tuple[list[ProbeResult], list[ConcurrentProbe]]:
    """Run all probes that fit the deployment's limits, in several rounds."""
    headers = tuple(replica.request_headers.items())
    target = Target(replica.url, await replica.model_name(), headers, keep_alive=replica.engine.keep_alive)
    vocabulary = tokens.vocabulary(model_files.location(settings.source))
    fitting = [
        one for one in PROBES if one.prompt + one.output < settings.context and one.concurrency <= settings.sequences
    ]
    results: list[ProbeResult] = []
    concurrent: list[ConcurrentProbe] = []
    began = time.monotonic()
    await asyncio.to_thread(_burst, target, vocabulary, fitting[0], seed=1)  # warm-up: the first request is slower
    for turn in range(_ROUNDS):
        for number, one in enumerate(fitting):
            if turn and time.monotonic() - began > max_s:
                break
            records = await asyncio.to_thread(_burst, target, vocabulary, one, seed=1000 * (turn + 1) + number)
            if result := _result(one, records):
                results.append(result)
                report(turn + 1, result)
        for concurrency in MIXED_CONCURRENCY:
            if concurrency <= settings.sequences and time.monotonic() - began < max_s:
                seed = 77 * turn + concurrency
                concurrent.append(await asyncio.to_thread(_closed_loop, target, vocabulary, concurrency, seed=seed))
    if len(results) < _MIN_RESULTS:
        raise InvalidMeasurement(
            f"{len(results)} probes gave a usable result, and calibration needs {_MIN_RESULTS}",
            hint="stop other work on this machine, or raise the engine's context length",
        )
    return results, concurrent


def _closed_loop(target: Target, vocabulary: tokens.Vocabulary, concurrency: int, *, seed: int) -> ConcurrentProbe:
    closed = {"arrivals": {"process": "closed", "users": concurrency}, "seed": seed}
    workload = Workload.model_validate(closed | MIXED_LENGTHS)
    traffic = prompts.prepare(workload, concurrency * _REQUESTS_PER_SLOT, vocabulary=vocabulary)
    records = generator.drive(target, traffic).records
    seconds = (max(records["end"]) - min(records["due"])) / 1e9
    tpot_s = tuple(metrics.tpot(records))
    return ConcurrentProbe(concurrency, tuple(traffic.prompt_tokens), tuple(traffic.output_tokens), seconds, tpot_s)


def _burst(target: Target, vocabulary: tokens.Vocabulary, one: Probe, *, seed: int) -> Records:
    workload = Workload.model_validate(
        {
            "arrivals": {"process": "closed", "users": one.concurrency},
            "prompt": {"shape": "fixed", "tokens": one.prompt},
            "output": {"shape": "fixed", "tokens": one.output},
            "seed": seed,
        }
    )
    traffic = prompts.prepare(workload, one.concurrency, vocabulary=vocabulary)
    return generator.drive(target, traffic).records


def _result(one: Probe, records: Records) -> ProbeResult | None:
    """Return the latencies of a burst; None if a request failed or no full decode step was seen.

    Between the last first token and the first finished request no prompt is prefilled, so a gap there is the duration
    of one decode step of the whole batch.
    """
    if len(records) < one.concurrency or not all(records.complete()):
        return None
    begin, end = max(records["first"]), min(records["end"])
    gaps = []
    for row in range(len(records)):
        at = records["first"][row]
        for gap in records.gaps_of(row):
            if at >= begin and at + 1000 * gap <= end:
                gaps.append(gap)
            at += 1000 * gap
    if not gaps:
        return None
    return ProbeResult(one, ttft_s=max(metrics.ttft(records)), step_s=sum(gaps) / len(gaps) / 1e6)
