"""Fit an engine's coefficients to this machine, from short probes of it, by least squares."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.deployment import Deployment
from powerband.core.device import Device
from powerband.core.engine import EngineSettings
from powerband.errors import InputError
from powerband.plan.probe import LONGEST, MOST_USERS, ConcurrentProbe, Probe, ProbeResult
from powerband.plan.simulate import Limits, simulate
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Steps
from powerband.store import documents, runs

Row = list[float]
_TOKENS = 2048  # of one step
_BANDWIDTH = 0.8  # the share of the memory's bandwidth that reading weights is believed to reach


def with_probe_capacity(deployment: Deployment[Any], *, on_cpu: bool) -> Deployment[Any]:
    """Return the deployment with the knobs that let every probe in."""
    engine = engines.get(deployment.engine)
    if engine.scheduling is None:
        raise InputError(
            f"there is nothing to calibrate in '{deployment.engine}'", hint="give --engine vllm or llamacpp"
        )
    choice = EngineSettings(
        source=deployment.variant.source,
        scheme="",
        kv_format=next(iter(engine.scheduling.kv_formats)),
        sequences=MOST_USERS,
        batched_tokens=_TOKENS,
        context=LONGEST,
        kv_bytes=2**30,
        on_cpu=on_cpu,
    )
    config = deployment.config
    wanted = config.model_dump() | engine.knobs_for(choice)
    return deployment.model_copy(update={"config": type(config).model_validate(wanted)})


def fit(
    steps: Steps,
    device: Device,
    engine: str,
    seen: Sequence[ProbeResult],
    crowds: Sequence[ConcurrentProbe] = (),
    *,
    name: str,
    source: str,
) -> Coefficients:
    """Return the coefficients under which the probes are most nearly what the roofline says."""
    rows, values = [], []
    for one in sorted({found.probe for found in seen}, key=lambda probe: (probe.users, probe.prompt)):
        same = [found for found in seen if found.probe == one]
        rows += [_first(steps, device, one), _token(steps, device, one)]
        values += [plain.median(found.ttft_s for found in same), plain.median(found.step_s for found in same)]
    solved = _least_squares(rows, values)
    constant, multiply, read_kv, attend, sequence_s, prompt_s = solved
    # Every step reads all weights, so its constant part is put down to that as far as the memory's speed explains it.
    at_full_speed = steps.weight_bytes / device.bandwidth
    reading = min(constant, at_full_speed / _BANDWIDTH)
    batches = _batches(steps, device, seen, solved)
    scheduling = engines.get(engine).scheduling
    found = Coefficients(
        name=name,
        engine=engine,
        devices=(device.name or "",),
        scheme=steps.scheme.name,
        bandwidth=at_full_speed / max(reading, 1e-9),
        compute=1 / max(multiply, 1e-6),
        kv_bandwidth=1 / max(read_kv, 1e-6),
        attention=1 / max(attend, 1e-6),
        overlap=1.0,
        step_s=constant - reading,
        sequence_s=sequence_s,
        prompt_s=prompt_s,
        apart=scheduling is not None and scheduling.apart,
        batches=batches,
        ttft=_spread([one.ttft_s / _times(_first(steps, device, one.probe), solved) for one in seen]),
        tpot=_spread(
            [one.step_s / _times(_token(steps, device, one.probe), solved) / batches[one.probe.users] for one in seen]
        ),
        source=source,
    )
    ratios = [one.seconds / _played(one, StepTimes(steps, device, found)) for one in crowds]
    return found.model_copy(update={"traffic": round(plain.median(ratios), 3)}) if ratios else found


def _played(crowd: ConcurrentProbe, times: StepTimes) -> float:
    """Return how long the crowd's requests take when they are played: all of them wait, so many are served at once."""
    limits = Limits(sequences=crowd.users, batched_tokens=_TOKENS, kv_tokens=math.inf)
    return max(simulate([0.0] * len(crowd.prompts), crowd.prompts, crowd.outputs, times, limits).e2e)


def _batches(steps: Steps, device: Device, seen: Sequence[ProbeResult], solved: Sequence[float]) -> dict[int, float]:
    """Return by how much a step of each number of answers differs: kernels like some numbers better than others."""
    ratios: dict[int, list[float]] = {}
    for one in seen:
        ratios.setdefault(one.probe.users, []).append(one.step_s / _times(_token(steps, device, one.probe), solved))
    return {users: round(plain.median(found), 3) for users, found in sorted(ratios.items())}


def _first(steps: Steps, device: Device, probe: Probe) -> Row:
    """What the roofline multiplies with each coefficient until everybody's prompt is read."""
    batch = Batch(prefill=probe.users * probe.prompt, behind=probe.prompt / 2, firsts=probe.users)
    return [*_work(steps, device, batch), float(probe.users)]


def _token(steps: Steps, device: Device, probe: Probe) -> Row:
    """And for a step in which everybody gets a token."""
    return [*_work(steps, device, Batch(decodes=probe.users, context=probe.prompt + probe.output / 2)), 0.0]


def _work(steps: Steps, device: Device, batch: Batch) -> Row:
    work = steps(batch)
    bandwidth, flops = float(device.bandwidth), device.flops(steps.scheme.multiplies_in(device.tflops))
    attending = work.attention_flops / device.flops("bf16")
    return [1.0, work.flops / flops, work.kv_bytes / bandwidth, attending, work.sequences]


def _times(row: Row, coefficients: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, coefficients, strict=True))


def _least_squares(rows: Sequence[Row], values: Sequence[float]) -> list[float]:
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
            error = sum((1 - _times(row, full)) ** 2 for row in scaled)
            if error < least - 1e-12:
                best, least = full, error
    return best


def _solve(rows: Sequence[Row]) -> list[float] | None:
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
    """Return the factors that hold 80 % of the probes of all rounds."""
    reach = sorted(abs(math.log(ratio)) for ratio in ratios)
    place = min(len(reach) - 1, math.ceil(0.8 * (len(reach) + 1)) - 1)
    wide = max(0.05, reach[place])
    return Spread(low=math.exp(-wide), high=math.exp(wide), of=len(ratios))


def folder() -> Path:
    """Return where this machine's coefficients are kept."""
    return runs.state_root() / "calibrations"


def keep(found: Coefficients) -> Path:
    """Write coefficients where the next plan finds them."""
    path = folder() / f"{found.engine}-{found.scheme}.yaml"
    runs.write_atomic(path, found.to_text())
    return path


def kept() -> tuple[Coefficients, ...]:
    """Return this machine's coefficients."""
    read = [documents.read(path) for path in sorted(folder().glob("*.yaml"))]
    return tuple(one for one in read if isinstance(one, Coefficients))
