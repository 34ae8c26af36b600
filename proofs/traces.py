"""Shared by the proofs of autoscaling: recorded and synthetic traces, the replicas that serve them, and what is compared."""

from __future__ import annotations

import csv
import io
import lzma
import math
import random
from collections.abc import Callable, Sequence

from prelude import ROOT

from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed

_FOLDER = ROOT / "proofs" / "data" / "traces"
RECORDED = ("azure-conversations", "azure-code", "mooncake-conversations")
SYNTHETIC = ("diurnal", "flash-crowd", "steps")
_H = 3600.0


def load(name: str) -> list[Arrival]:
    """Return a trace by its name."""
    return recorded(name) if name in RECORDED else synthetic(name)


def recorded(name: str) -> list[Arrival]:
    """Return a recorded trace of about an hour."""
    text = lzma.decompress((_FOLDER / f"{name}.csv.xz").read_bytes()).decode()
    rows = csv.DictReader(io.StringIO(text))
    return [
        Arrival(float(row["arrived_s"]), int(row["prompt_tokens"]), max(1, int(row["output_tokens"]))) for row in rows
    ]


def synthetic(name: str, *, seed: int = 1) -> list[Arrival]:
    """Return a synthetic trace: Poisson arrivals at a rate that varies, and lognormal lengths."""
    hours, rate = _RATES[name]
    rng, now_s, found = random.Random(f"{name} {seed}"), 0.0, []
    peak = max(rate(step * hours * _H / 5000) for step in range(5001))
    while (now_s := now_s + rng.expovariate(peak)) < hours * _H:
        if rng.random() < rate(now_s) / peak:
            prompt, output = rng.lognormvariate(math.log(1000), 0.8), rng.lognormvariate(math.log(400), 0.6)
            found.append(Arrival(now_s, max(1, round(prompt)), max(1, round(output))))
    return found


def _diurnal(at_s: float) -> float:
    """Return the rate of a day that begins at midnight: quiet at night, two peaks."""
    hour = at_s / _H
    day = math.exp(-(((hour - 11) / 2.5) ** 2)) + 0.9 * math.exp(-(((hour - 16) / 2.5) ** 2))
    return 0.12 + 0.9 * day


def _flash_crowd(at_s: float) -> float:
    """Return a constant rate with a crowd that comes within a minute, stays twenty, and leaves slowly."""
    begin, stay = 2.0 * _H, 1200.0
    if at_s < begin:
        return 0.6
    if at_s < begin + 60:
        return 0.6 + 2.4 * (at_s - begin) / 60
    if at_s < begin + 60 + stay:
        return 3.0
    return 0.6 + 2.4 * math.exp(-(at_s - begin - 60 - stay) / 900)


def _steps(at_s: float) -> float:
    """Return a rate that steps up and down every 40 minutes."""
    return (0.6, 1.8, 0.9, 2.4, 0.5, 1.5)[int(at_s // 2400) % 6]


_RATES: dict[str, tuple[float, Callable[[float], float]]] = {
    "diurnal": (24.0, _diurnal),
    "flash-crowd": (4.0, _flash_crowd),
    "steps": (4.0, _steps),
}


def speed_for(name: str, trace: Sequence[Arrival]) -> ReplicaSpeed:
    """Return a replica for a trace.

    Alone, a request of mean length is prefilled in half a second and answered in 5 s more; the synthetic traces have
    fewer and longer requests, so that a day is short to simulate: 25 s.
    """
    prompt = sum(one.prompt_tokens for one in trace) / len(trace)
    output = sum(one.output_tokens for one in trace) / len(trace)
    answer_s, slots = (5.0, 4) if name in RECORDED else (25.0, 4)
    return ReplicaSpeed(
        slots, step_s=0.9 * answer_s / output, sequence_s=0.1 * answer_s / output, prompt_token_s=0.5 / prompt
    )
