"""Fit an engine's coefficients to this machine by least squares, from short probes."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.deployment import Deployment
from powerband.core.device import Device
from powerband.core.engine import EngineSettings
from powerband.core.statistics import quantile
from powerband.errors import InputError
from powerband.plan.probe import MAX_CONCURRENCY, MAX_CONTEXT, ConcurrentProbe, Probe, ProbeResult
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Steps
from powerband.runtime import installations
from powerband.store import documents, runs

Row = list[float]
_BATCHED_TOKENS = 2048
_TAIL = 0.9
_BANDWIDTH = 0.8  # the share of the memory bandwidth that reading weights is assumed to reach


def with_probe_capacity(deployment: Deployment[Any], *, on_cpu: bool) -> Deployment[Any]:
    """Return the deployment with limits that are high enough for every probe."""
    engine = engines.get(deployment.engine)
    if engine.scheduling is None:
        raise InputError(
            f"'{deployment.engine}' cannot be calibrated: it has no scheduler model",
            hint="give --engine vllm or --engine llamacpp",
        )
    settings = EngineSettings(
        source=deployment.variant.source,
        scheme="",
        kv_format=next(iter(engine.scheduling.kv_formats)),
        sequences=MAX_CONCURRENCY,
        batched_tokens=_BATCHED_TOKENS,
        context=MAX_CONTEXT,
        kv_bytes=2**30,
        on_cpu=on_cpu,
    )
    config = deployment.config
    wanted = config.model_dump() | engine.knobs_for(settings)
    return deployment.model_copy(update={"config": type(config).model_validate(wanted)})


def fit(
    steps: Steps,
    device: Device,
    engine: str,
    results: Sequence[ProbeResult],
    concurrent: Sequence[ConcurrentProbe] = (),
    *,
    name: str,
    source: str,
    engine_version: str = "",
) -> Coefficients:
    """Return the coefficients with which the roofline is closest to the probes."""
    rows, values = [], []
    for one in sorted({found.probe for found in results}, key=lambda probe: (probe.concurrency, probe.prompt)):
        same = [found for found in results if found.probe == one]
        rows += [_prefill_row(steps, device, one), _decode_row(steps, device, one)]
        values += [plain.median(found.ttft_s for found in same), plain.median(found.step_s for found in same)]
    solved = _least_squares(rows, values)
    constant, multiply, read_kv, attend, sequence_s, prompt_s = solved
    # Every step reads all weights, so the constant part counts as weight reading up to what the bandwidth explains.
    at_full_speed = steps.weight_bytes / device.bandwidth
    reading = min(constant, at_full_speed / _BANDWIDTH)
    factors = _batch_size_factors(steps, device, results, solved)
    scheduling = engines.get(engine).scheduling
    found = Coefficients(
        name=name,
        engine=engine,
        engine_version=engine_version,
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
        separate_prefill_decode=scheduling is not None and scheduling.separate_prefill_decode,
        batch_size_factors=factors,
        ttft=_spread([one.ttft_s / _seconds(_prefill_row(steps, device, one.probe), solved) for one in results]),
        tpot=_spread(
            [
                one.step_s / _seconds(_decode_row(steps, device, one.probe), solved) / factors[one.probe.concurrency]
                for one in results
            ]
        ),
        source=source,
    )
    if not concurrent:
        return found
    simulated = [_simulated(one, StepTimes(steps, device, found)) for one in concurrent]
    factor = plain.median(one.seconds / max(seen.e2e) for one, seen in zip(concurrent, simulated, strict=True))
    tails = [
        quantile(sorted(one.tpot_s), _TAIL) / (factor * quantile(sorted(seen.tpot), _TAIL))
        for one, seen in zip(concurrent, simulated, strict=True)
        if one.tpot_s
    ]
    more = {"tpot_tail": round(plain.median(tails), 3)} if tails else {}
    return found.model_copy(update={"mixed_load_factor": round(factor, 3), **more})


def _simulated(probe: ConcurrentProbe, times: StepTimes) -> Outcome:
    """Return the simulated closed loop: all requests wait at the start, and `concurrency` of them run."""
    limits = Limits(sequences=probe.concurrency, batched_tokens=_BATCHED_TOKENS, kv_tokens=math.inf)
    return simulate([0.0] * len(probe.prompts), probe.prompts, probe.outputs, times, limits)


def _batch_size_factors(
    steps: Steps, device: Device, results: Sequence[ProbeResult], solved: Sequence[float]
) -> dict[int, float]:
    """Return measured over fitted decode time for each batch size: kernels are not equally efficient at all sizes."""
    ratios: dict[int, list[float]] = {}
    for one in results:
        ratio = one.step_s / _seconds(_decode_row(steps, device, one.probe), solved)
        ratios.setdefault(one.probe.concurrency, []).append(ratio)
    return {size: round(plain.median(found), 3) for size, found in sorted(ratios.items())}


def _prefill_row(steps: Steps, device: Device, probe: Probe) -> Row:
    """Return what each coefficient is multiplied with in the time until every prompt of a burst is prefilled."""
    tokens = probe.concurrency * probe.prompt
    batch = Batch(prefill_tokens=tokens, prefill_context=probe.prompt / 2, finished_prompts=probe.concurrency)
    return [*_work(steps, device, batch), float(probe.concurrency)]


def _decode_row(steps: Steps, device: Device, probe: Probe) -> Row:
    """Return the same for one decode step of the whole burst."""
    batch = Batch(decodes=probe.concurrency, decode_context=probe.prompt + probe.output / 2)
    return [*_work(steps, device, batch), 0.0]


def _work(steps: Steps, device: Device, batch: Batch) -> Row:
    work = steps(batch)
    bandwidth, flops = float(device.bandwidth), device.flops(steps.scheme.compute_dtype(device.tflops))
    attention = work.attention_flops / device.flops("bf16")
    return [1.0, work.flops / flops, work.kv_bytes / bandwidth, attention, work.sequences]


def _seconds(row: Row, coefficients: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, coefficients, strict=True))


def _least_squares(rows: Sequence[Row], values: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients with the smallest relative errors, trying every subset of non-zero ones."""
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
            error = sum((1 - _seconds(row, full)) ** 2 for row in scaled)
            if error < least - 1e-12:
                best, least = full, error
    return best


def _solve(rows: Sequence[Row]) -> list[float] | None:
    """Solve the normal equations for a right-hand side of ones by elimination; None if they are singular."""
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
    """Return the factors between which 80 % of the ratios fall."""
    logs = sorted(abs(math.log(ratio)) for ratio in ratios)
    place = min(len(logs) - 1, math.ceil(0.8 * (len(logs) + 1)) - 1)
    half_width = max(0.05, logs[place])
    return Spread(low=math.exp(-half_width), high=math.exp(half_width), points=len(ratios))


def folder() -> Path:
    """Return the folder of this machine's coefficients."""
    return runs.state_root() / "calibrations"


def save(found: Coefficients) -> Path:
    """Write coefficients for later plans on this machine, and return the file."""
    path = folder() / f"{found.engine}-{found.scheme}.yaml"
    runs.write_atomic(path, found.to_text())
    return path


def saved() -> tuple[Coefficients, ...]:
    """Return this machine's coefficients without the expired ones.

    Those that were adopted, with '~' in their file names, come last.
    """
    return tuple(one for one in _all_saved() if not _newer_version(one))


def expired() -> list[str]:
    """Return a sentence for each file of coefficients that was measured with another version than the installed one."""
    return [
        f"the calibration of {one.engine} {one.engine_version} is not used: {version} is installed; "
        "calibrate again with --calibrate"
        for one in _all_saved()
        if (version := _newer_version(one))
    ]


def _all_saved() -> Iterator[Coefficients]:
    for path in sorted(folder().glob("*.yaml"), key=lambda path: ("~" in path.name, path.name)):
        if isinstance(found := documents.read(path), Coefficients):
            yield found


def _newer_version(one: Coefficients) -> str:
    """Return the installed version if the coefficients were measured with another one.

    Programs on PATH are not asked for their version, because that takes seconds.
    """
    version = next((found.version for found in installations.managed(one.engine)), "")
    return version if one.engine_version and version and version != one.engine_version else ""
