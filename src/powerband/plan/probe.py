"""Short probes of a real engine: bursts of equal requests, whose steps do nothing else meanwhile."""

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
from powerband.runtime.replica import Replica

_ROUNDS = 5  # a machine is not the same from one minute to the next
_MOST_S = 420.0
_LEAST = 6


@dataclass(frozen=True)
class Probe:
    """So many requests at once."""

    users: int
    prompt: int
    output: int


# One user reads prompts of several lengths and writes at several depths; more users show what a batch costs.
PROBES = (
    Probe(1, 32, 32), Probe(1, 128, 16), Probe(1, 384, 16), Probe(1, 1024, 24),
    Probe(2, 32, 32), Probe(3, 32, 32), Probe(4, 32, 32), Probe(6, 32, 32), Probe(8, 32, 32), Probe(16, 32, 32),
    Probe(2, 384, 24), Probe(4, 128, 24), Probe(8, 128, 24),
)  # fmt: skip
# And unlike requests one after another, as traffic is: what a burst shows is not quite what traffic gets.
TRAFFIC = {"prompt": {"shape": "lognormal", "median": 80, "p95": 300, "max": 480},
           "output": {"shape": "lognormal", "median": 24, "p95": 64, "max": 96}}  # fmt: skip
TRAFFIC_USERS = (2, 4, 8)
_TURNS = 6  # requests of each user, in each round
LONGEST = max(one.prompt + one.output for one in PROBES) + 512  # with room for a chat template
MOST_USERS = max(one.users for one in PROBES)


@dataclass(frozen=True)
class ProbeResult:
    """What a probe showed: when the last user had a first token, and how long a step takes in which all get one."""

    probe: Probe
    ttft_s: float
    step_s: float


@dataclass(frozen=True)
class ConcurrentProbe:
    """Users who never pause, with unlike requests, and how long all of them took."""

    users: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float


async def probe(
    replica: Replica,
    choice: EngineSettings,
    *,
    say: Callable[[int, ProbeResult], None] = lambda *_: None,
    most_s: float = _MOST_S,
) -> tuple[list[ProbeResult], list[ConcurrentProbe]]:
    """Run the probes that the deployment has room for, and some traffic, round after round."""
    headers = tuple(replica.request_headers.items())
    target = Target(replica.url, await replica.model_name(), headers, keep_alive=replica.engine.keeps_connections)
    vocabulary = tokens.vocabulary(choice.source)
    fitting = [one for one in PROBES if one.prompt + one.output < choice.context and one.users <= choice.sequences]
    found: list[ProbeResult] = []
    crowds: list[ConcurrentProbe] = []
    began = time.monotonic()
    await asyncio.to_thread(
        _burst, target, vocabulary, fitting[0], seed=1
    )  # the first request of all is not like others
    for turn in range(_ROUNDS):
        for number, one in enumerate(fitting):
            if turn and time.monotonic() - began > most_s:
                break
            records = await asyncio.to_thread(_burst, target, vocabulary, one, seed=1000 * (turn + 1) + number)
            if seen := _read(one, records):
                found.append(seen)
                say(turn + 1, seen)
        for users in TRAFFIC_USERS:
            if users <= choice.sequences and time.monotonic() - began < most_s:
                crowds.append(await asyncio.to_thread(_crowd, target, vocabulary, users, seed=77 * turn + users))
    if len(found) < _LEAST:
        raise InvalidMeasurement(
            "too few probes were answered", hint="is the machine busy? give the model more context"
        )
    return found, crowds


def _crowd(target: Target, vocabulary: tokens.Vocabulary, users: int, *, seed: int) -> ConcurrentProbe:
    closed = {"arrivals": {"process": "closed", "users": users}, "seed": seed}
    traffic = prompts.prepare(Workload.model_validate(closed | TRAFFIC), users * _TURNS, vocabulary=vocabulary)
    records = generator.drive(target, traffic).records
    seconds = (max(records["end"]) - min(records["due"])) / 1e9
    return ConcurrentProbe(users, tuple(traffic.prompt_tokens), tuple(traffic.output_tokens), seconds)


def _burst(target: Target, vocabulary: tokens.Vocabulary, one: Probe, *, seed: int) -> Records:
    workload = Workload.model_validate(
        {
            "arrivals": {"process": "closed", "users": one.users},
            "prompt": {"shape": "fixed", "tokens": one.prompt},
            "output": {"shape": "fixed", "tokens": one.output},
            "seed": seed,
        }
    )
    traffic = prompts.prepare(workload, one.users, vocabulary=vocabulary)
    return generator.drive(target, traffic).records


def _read(one: Probe, records: Records) -> ProbeResult | None:
    """Look at the gaps between the last first token and the first end: nobody's prompt is read there."""
    if len(records) < one.users or not all(records.complete()):
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
