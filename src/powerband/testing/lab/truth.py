"""The step times of the lab's engines. They come from measured GPU rows (`truth.csv`), not from Powerband's planner.

Each row is the mean TTFT and TPOT of one load: `concurrency` users who send prompts of `isl` tokens and get answers of
`osl` tokens.
"""

from __future__ import annotations

import csv
import math
import random
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from powerband import catalog
from powerband.core import units

ROUNDS = 10  # requests of each user in InferenceMAX, where most rows come from; all users start at once
CHUNK_TOKENS = 8192  # prefilled in one step
ACTIVE_PARAMETERS = {  # read for each token, from the publishers' model cards
    "meta-llama/Llama-3.1-8B-Instruct": 8.0e9,
    "meta-llama/Llama-3.1-70B": 70.6e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "Qwen/Qwen3-235B-A22B-FP8": 22e9,
    "openai/gpt-oss-120b": 5.1e9,
    "MiniMaxAI/MiniMax-M2.5": 10e9,
    "moonshotai/Kimi-K2.5": 32e9,
}
_PARAMETER_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "int4": 0.53}
_HOST_S = 0.0015  # of each step, whatever the device
_OTHER = 0.3  # distance, as a log ratio, between two precisions or two models
_SPREAD = 0.02  # standard deviation of the draws, as a log ratio


@dataclass(frozen=True)
class Row:
    """One measured load."""

    model: str
    system: str  # the device's name in the catalogue
    backend: str
    precision: str
    tp: int
    isl: int
    osl: int
    concurrency: int
    ttft_s: float
    tpot_s: float

    @property
    def active_bytes(self) -> float:
        """Return the weights that one token reads on each device."""
        return ACTIVE_PARAMETERS[self.model] * _PARAMETER_BYTES[self.precision] / self.tp

    @property
    def decoding(self) -> float:
        """Return the share of its time that a request decodes."""
        return self.osl * self.tpot_s / (self.ttft_s + self.osl * self.tpot_s)

    def decode_step_s(self, prefill_s: float) -> float:
        """Return the TPOT without the prefills of other requests, at a prefill time of a token."""
        stalls = (self.concurrency - 1) * self.decoding / self.osl  # prefills for each output token
        return max(0.3 * self.tpot_s, self.tpot_s - stalls * self.isl * prefill_s)


@dataclass(frozen=True)
class Curve:
    """The duration of decode steps at one mean context, by the number of sequences, both as logarithms."""

    context_tokens: float
    log_sequences: tuple[float, ...]
    log_step_s: tuple[float, ...]

    def step_s(self, log_sequences: float) -> float:
        """Interpolate; below the first point it stays, beyond the last it grows by the same time for each sequence."""
        x, y = self.log_sequences, self.log_step_s
        if len(x) == 1 or log_sequences <= x[0]:
            return math.exp(y[0])
        if log_sequences > x[-1]:
            return math.exp(y[-1]) + self._growth_s() * (math.exp(log_sequences) - math.exp(x[-1]))
        right = bisect(x, log_sequences, hi=len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        return math.exp(y[right - 1] + slope * (log_sequences - x[right - 1]))

    def _growth_s(self) -> float:
        """Return the time that one more sequence adds: of the last two points, or of all if that is more."""
        sequences, steps_s = [[math.exp(one) for one in own] for own in (self.log_sequences, self.log_step_s)]
        growths = [(steps_s[-1] - steps_s[one]) / (sequences[-1] - sequences[one]) for one in (-2, 0)]
        return max(0.0, *growths)


@dataclass(frozen=True)
class StepTimes:
    """The duration of engine steps."""

    curves: tuple[Curve, ...]  # by increasing context
    prefill_s_per_token: float
    request_s: float = 0.0  # before the scheduler sees a request
    ripple: tuple[float, ...] = ()  # deviations between powers of two of the number of sequences, as log ratios

    def step_s(self, decode_sequences: int, prefill_tokens: int, context_tokens: float) -> float:
        """Return the duration of one step; `context_tokens` is the mean of the sequences that decode."""
        log_sequences = math.log(max(1, decode_sequences))
        decode_s = self._decode_s(log_sequences, context_tokens)
        if self.ripple:
            octave, part = divmod(log_sequences / math.log(2), 1.0)
            decode_s *= math.exp(self.ripple[int(octave) % len(self.ripple)] * math.sin(math.pi * part))
        return decode_s + prefill_tokens * self.prefill_s_per_token

    def scaled(self, *, decode: float, prefill: float) -> StepTimes:
        """Return these times with other decode and prefill durations; the host's part stays."""
        curves = tuple(
            replace(
                curve,
                log_step_s=tuple(
                    math.log(_HOST_S + decode * max(math.exp(one) - _HOST_S, 0.0)) for one in curve.log_step_s
                ),
            )
            for curve in self.curves
        )
        return replace(self, curves=curves, prefill_s_per_token=prefill * self.prefill_s_per_token)

    def _decode_s(self, log_sequences: float, context_tokens: float) -> float:
        """Interpolate between the contexts; the duration grows beyond them as it does between the first and last."""
        first, last = self.curves[0], self.curves[-1]
        inside = first.context_tokens < context_tokens < last.context_tokens
        if inside:
            right = bisect([curve.context_tokens for curve in self.curves], context_tokens)
            first, last = self.curves[right - 1], self.curves[right]
        low_s = first.step_s(log_sequences)
        if first is last:
            return low_s
        high_s = last.step_s(log_sequences)
        share = (context_tokens - first.context_tokens) / (last.context_tokens - first.context_tokens)
        return low_s + share * (high_s - low_s) if inside else max(low_s / 2, low_s + share * max(high_s - low_s, 0.0))


@cache
def read_rows() -> tuple[Row, ...]:
    """Return the rows of `truth.csv`."""
    with Path(__file__).with_name("truth.csv").open() as stream:
        return tuple(
            Row(
                model=row["model"],
                system=row["system"],
                backend=row["backend"],
                precision=row["precision"],
                tp=int(row["tp"]),
                isl=int(row["isl"]),
                osl=int(row["osl"]),
                concurrency=int(row["concurrency"]),
                ttft_s=float(row["ttft_ms"]) / 1e3,
                tpot_s=float(row["tpot_ms"]) / 1e3,
            )
            for row in csv.DictReader(stream)
        )


def step_times(
    *, system: str, active_bytes: float, devices: int, precision: str, seed: int, model: str | None = None
) -> StepTimes:
    """Return the step times of a model on some devices of a system, from its own rows or else from the nearest ones.

    `active_bytes` are the weights that one token reads, over all devices. What no row tells is drawn by the seed.
    """
    system = system.replace("_", "-")
    configs: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in read_rows():
        configs.setdefault((row.model, row.system, row.precision, row.tp), []).append(row)
    bandwidth, flops = _device(system)

    def ratios(rows: list[Row]) -> tuple[float, float]:
        row_bandwidth, row_flops = _device(rows[0].system)
        read = active_bytes / devices / rows[0].active_bytes
        computed = read * _PARAMETER_BYTES[rows[0].precision] / _PARAMETER_BYTES[precision]
        return read * row_bandwidth / bandwidth, computed * row_flops / flops

    def distance(rows: list[Row]) -> float:
        row, others = rows[0], [rows[0].precision != precision]
        others.append(model is None or _family(model) != _family(row.model))
        apart = abs(math.log(_device(row.system)[0] / bandwidth))
        return abs(math.log(ratios(rows)[0])) + _OTHER * (apart + sum(others))

    own = [
        rows
        for key, rows in configs.items()
        if model and (_family(key[0]), *key[1:]) == (_family(model), system, precision, devices)
    ]
    rows = own[0] if own else min(configs.values(), key=distance)
    decode, prefill = (1.0, 1.0) if own else ratios(rows)
    draw = random.Random(seed)
    found = step_times_from(rows).scaled(
        decode=decode * math.exp(draw.gauss(0, _SPREAD)), prefill=prefill * math.exp(draw.gauss(0, _SPREAD))
    )
    return replace(found, ripple=tuple(draw.gauss(0, _SPREAD) for _ in range(10)))


def step_times_from(rows: Sequence[Row]) -> StepTimes:
    """Return the step times that reproduce the rows of one configuration, without any draw."""
    request_s, prefill_s = _prefill(rows)
    series: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        point = (math.log(max(1.0, row.concurrency * row.decoding)), math.log(row.decode_step_s(prefill_s)))
        series.setdefault(row.isl + row.osl / 2, []).append(point)
    curves = []
    for context_tokens, points in sorted(series.items()):
        points.sort()
        curves.append(Curve(context_tokens, tuple(x for x, _ in points), tuple(y for _, y in points)))
    return StepTimes(tuple(curves), prefill_s, request_s)


def _prefill(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the fixed part of the TTFT and the prefill time of a token.

    They minimize the squares of the relative errors of the TTFT that `_ttft_parts` composes. It depends on the prefill
    time itself, so this iterates.
    """
    request_s = prefill_s = 0.0
    for _ in range(10):
        a11 = a12 = a22 = b1 = b2 = 0.0
        for row in rows:
            decode_s, prefills = _ttft_parts(row, prefill_s)
            x1, x2, y = 1 / row.ttft_s, prefills * row.isl / row.ttft_s, 1 - decode_s / row.ttft_s
            a11, a12, a22 = a11 + x1 * x1, a12 + x1 * x2, a22 + x2 * x2
            b1, b2 = b1 + x1 * y, b2 + x2 * y
        determinant = a11 * a22 - a12 * a12
        request_s = (b1 * a22 - b2 * a12) / determinant if determinant > 1e-9 * a11 * a22 else 0.0
        if request_s > 0:
            prefill_s = (a11 * b2 - a12 * b1) / determinant
        else:
            request_s, prefill_s = 0.0, b2 / a22
        prefill_s = max(prefill_s, 0.0)
    return request_s, prefill_s


def _ttft_parts(row: Row, prefill_s: float) -> tuple[float, float]:
    """Return the decode part of a row's TTFT after the fixed part, and how many prefills of one prompt it contains.

    A request waits for the end of a step, then shares its own step with the other requests that arrived meanwhile. In
    the first round all requests arrive at once, so that they wait for each other.
    """
    step_s, prompt_s = row.decode_step_s(prefill_s), row.isl * prefill_s
    cycle_s = row.ttft_s + row.osl * row.tpot_s
    prefilling = min(1.0, row.concurrency * (step_s + prompt_s) / cycle_s)  # share of time in steps with a prefill
    others = (row.concurrency - 1) / cycle_s * (step_s + prefilling * prompt_s)
    together = max(1.0, min(row.concurrency, CHUNK_TOKENS / row.isl))
    first_steps, first_prefills = (row.concurrency / together + 1) / 2, (row.concurrency + together) / 2
    share = 1 / ROUNDS
    steps = (1 - share) * 1.5 + share * first_steps
    return steps * step_s, (1 - share) * (1 + prefilling / 2 + others) + share * first_prefills


@cache
def _device(name: str) -> tuple[float, float]:
    """Return the memory bandwidth and the bf16 rate of a device by its datasheet; an unknown device is an H100."""
    facts = yaml.safe_load(catalog.text("device", name if name in catalog.names("device") else "h100-sxm"))
    return float(str(units.parse_bytes(facts["bandwidth"]))), 1e12 * facts["tflops"]["bf16"]


def _family(model: str) -> str:
    """Return a model's name without its publisher, variant and precision."""
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"-(instruct|it|chat|base|fp8|fp4|nvfp4|bf16|awq|gptq|dynamic)(?=-|$)", "", name)
