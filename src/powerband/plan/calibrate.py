"""Fit an engine's coefficients to this machine: short probes on a real engine, then least squares."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics as plain
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines, metrics
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.deployment import Deployment
from powerband.core.device import Device
from powerband.core.engine import Choice
from powerband.core.records import Records
from powerband.core.workload import Workload
from powerband.errors import InputError, InvalidMeasurement
from powerband.launchers.local import Prepared
from powerband.load import generator, prompts, tokens
from powerband.load.wire import Target
from powerband.plan.work import Batch, Steps
from powerband.runtime.replica import Replica
from powerband.store import documents, runs

_LEAST_ANSWERS = 3
_MOST_S = 25.0


@dataclass(frozen=True)
class Probe:
    """A closed loop of equal requests."""

    users: int
    prompt: int
    output: int


# One user reads long prompts and writes at two depths; more users show what a batch costs.
PROBES = (
    Probe(1, 32, 24), Probe(1, 256, 16), Probe(1, 900, 16), Probe(1, 1500, 24),
    Probe(2, 64, 32), Probe(4, 64, 32), Probe(8, 64, 32), Probe(4, 600, 24), Probe(8, 300, 24),
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a probe showed."""

    probe: Probe
    ttft_s: float
    tpot_s: float
    answers: int


def roomy(deployment: Deployment[Any], *, on_cpu: bool) -> Deployment[Any]:
    """Return the deployment with the knobs that let every probe in."""
    longest = max(one.prompt + one.output for one in PROBES) + 512
    users = max(one.users for one in PROBES)
    choice = Choice(
        source=deployment.variant.source,
        scheme="",
        kv_format=_plain_kv(deployment),
        sequences=users,
        batched_tokens=2048,
        context=longest,
        kv_bytes=2**30,
        on_cpu=on_cpu,
    )
    config = deployment.config
    wanted = config.model_dump() | engines.get(deployment.engine).knobs_for(choice)
    return deployment.model_copy(update={"config": type(config).model_validate(wanted)})


def _plain_kv(deployment: Deployment[Any]) -> str:
    scheduling = engines.get(deployment.engine).scheduling
    if scheduling is None:
        raise InputError(
            f"there is nothing to calibrate in '{deployment.engine}'", hint="give --engine vllm or llamacpp"
        )
    return next(iter(scheduling.kv_formats))


async def probe(
    replica: Replica, prepared: Prepared, *, say: Callable[[Seen], None] = lambda _: None, most_s: float = _MOST_S
) -> list[Seen]:
    """Run the probes that fit the deployment's context and slots."""
    headers = tuple(replica.request_headers.items())
    target = Target(replica.url, await replica.model_name(), headers, keep_alive=prepared.engine.keeps_connections)
    vocabulary = tokens.vocabulary(prepared.deployment.variant.source)
    room = _room(prepared)
    found = []
    for number, one in enumerate(PROBES):
        if one.prompt + one.output + 64 > room[0] or one.users > room[1]:
            continue
        workload = Workload.model_validate(
            {
                "arrivals": {"process": "closed", "users": one.users},
                "prompt": {"shape": "fixed", "tokens": one.prompt},
                "output": {"shape": "fixed", "tokens": one.output},
                "seed": 1000 + number,
            }
        )
        count = 40 * one.users
        traffic = prompts.prepare(workload, count, vocabulary=vocabulary)
        began = time.monotonic()

        def until(_: object, records: Records, began: float = began, users: int = one.users) -> bool:
            enough = len(records) >= max(users * (_LEAST_ANSWERS + 1), 6)
            return time.monotonic() - began > most_s or (enough and time.monotonic() - began > most_s / 4)

        run = await asyncio.to_thread(generator.drive, target, traffic, until=until)
        complete = run.records.complete()
        rows = [row for row, done in enumerate(complete) if done][one.users :]  # the first of each user warms up
        if len(rows) < _LEAST_ANSWERS:
            continue
        kept = run.records.select(rows)
        seen = Seen(one, plain.median(metrics.ttft(kept)), plain.median(metrics.tpot(kept)), len(rows))
        found.append(seen)
        say(seen)
    if len(found) < 4:
        raise InvalidMeasurement(
            "too few probes were answered", hint="is the machine busy? give the model more context"
        )
    return found


def _room(prepared: Prepared) -> tuple[int, int]:
    """Return the tokens of the longest sequence and the answers at once that the deployment allows."""
    config, model = prepared.deployment.config, prepared.model
    if prepared.deployment.engine == "llamacpp":
        slots = config.parallel or 4
        return (config.ctx_size or model.context_tokens or 4096) // slots, slots
    return config.max_model_len or model.context_tokens or 4096, config.max_num_seqs or 64


def fit(steps: Steps, device: Device, engine: str, seen: Sequence[Seen], *, name: str, source: str) -> Coefficients:
    """Return the coefficients under which the probes are most nearly what the roofline says."""
    told = [found for one in seen for found in _observations(steps, device, one)]
    solved = _least_squares([row for _, row, _ in told], [value for *_, value in told])
    errors: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for metric, row, value in told:
        errors[metric].append(value / max(1e-9, sum(a * b for a, b in zip(row, solved, strict=True))))
    step_s, read, multiply, read_kv, attend, sequence_s, request_s = solved
    return Coefficients(
        name=name,
        engine=engine,
        devices=(device.name or "",),
        scheme=steps.scheme.name,
        bandwidth=1 / max(read, 1e-6),
        compute=1 / max(multiply, 1e-6),
        kv_bandwidth=1 / max(read_kv, 1e-6),
        attention=1 / max(attend, 1e-6),
        overlap=1.0,
        step_s=step_s,
        sequence_s=sequence_s,
        request_s=request_s,
        ttft=_spread(errors["ttft"]),
        tpot=_spread(errors["tpot"]),
        source=source,
    )


def _observations(steps: Steps, device: Device, seen: Seen) -> list[tuple[str, list[float], float]]:
    """Return what the roofline multiplies with each coefficient, for a probe's time per token, and for its TTFT.

    Users of equal requests fall into step and wait for each other's prompts, so only one alone tells the
    time of a prompt.
    """
    probe = seen.probe

    def row(batch: Batch, request: float) -> list[float]:
        work = steps(batch)
        bandwidth, flops = float(device.bandwidth), device.flops(steps.scheme.multiplies_in(device.tflops))
        return [1.0, work.weight_bytes / bandwidth, work.flops / flops, work.kv_bytes / bandwidth,
                work.attention_flops / device.flops("bf16"), work.sequences, request]  # fmt: skip

    token = row(Batch(decodes=probe.users, context=probe.prompt + probe.output / 2), 0.0)
    prompt = row(Batch(prefill=probe.prompt, behind=probe.prompt / 2, firsts=1), 1.0)
    if probe.users == 1:
        return [("tpot", token, seen.tpot_s), ("ttft", prompt, seen.ttft_s)]
    share = (probe.users - 1) / probe.output  # prompts of others that are read while one token is written
    mixed = [a + share * b for a, b in zip(token, [0.0, *prompt[1:-1], 0.0], strict=True)]
    return [("tpot", mixed, seen.tpot_s)]


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients with the smallest relative errors, by trying which of them are zero."""
    width = len(rows[0])
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    best, least = [0.0] * width, math.inf
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            found = _solve([[row[place] for place in chosen] for row in scaled])
            if found is None or min(found) < 0:
                continue
            full = [0.0] * width
            for place, value in zip(chosen, found, strict=True):
                full[place] = value
            error = sum((1 - sum(a * b for a, b in zip(row, full, strict=True))) ** 2 for row in scaled)
            if error < least - 1e-12:
                best, least = full, error
    return best


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve the normal equations for a right side of ones, by elimination."""
    width = len(rows[0])
    table = [
        [sum(row[a] * row[b] for row in rows) for b in range(width)] + [sum(row[a] for row in rows)]
        for a in range(width)
    ]
    for place in range(width):
        pivot = max(range(place, width), key=lambda row: abs(table[row][place]))
        if abs(table[pivot][place]) < 1e-30:
            return None
        table[place], table[pivot] = table[pivot], table[place]
        for row in range(width):
            if row != place:
                factor = table[row][place] / table[place][place]
                table[row] = [a - factor * b for a, b in zip(table[row], table[place], strict=True)]
    return [table[place][-1] / table[place][place] for place in range(width)]


def _spread(ratios: Sequence[float]) -> Spread:
    """Return the factors that held 80 % of the probes, and somewhat more: a fit flatters itself."""
    reach = sorted(abs(math.log(ratio)) for ratio in ratios)
    place = min(len(reach) - 1, math.ceil(0.8 * (len(reach) + 1)) - 1)
    wide = max(0.05, 1.5 * reach[place])
    return Spread(low=math.exp(-wide), high=math.exp(wide), of=len(ratios))


def folder() -> Path:
    """Return where this machine's coefficients are kept."""
    return runs.state_root() / "calibrations"


def keep(found: Coefficients) -> Path:
    """Write coefficients where the next plan finds them."""
    path = folder() / f"{found.engine}-{found.scheme}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(found.to_text())
    return path


def kept() -> tuple[Coefficients, ...]:
    """Return this machine's coefficients."""
    read = [documents.read(path) for path in sorted(folder().glob("*.yaml"))]
    return tuple(one for one in read if isinstance(one, Coefficients))
