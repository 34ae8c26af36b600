"""Corrects the roofline's errors with boosted trees fitted to measurements.

The trees are stored as data in the catalogue and evaluated in plain Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from powerband import catalog
from powerband.core.coefficients import Spread
from powerband.plan.closed_loop import SteadyState
from powerband.plan.step_time import StepTimes

ENGINES = ("vllm", "sglang", "trtllm")  # the position is a feature of the trees
FORMATS = ("bf16", "fp8", "fp4")  # likewise
Tree = list[Any]  # nested [feature, threshold, left, right]; leaves are numbers


class Correction(NamedTuple):
    """Factors that correct the roofline's latencies, and the spread of the errors that remain."""

    ttft: float
    tpot: float
    ttft_spread: Spread
    tpot_spread: Spread


@dataclass(frozen=True)
class ResidualModel:
    """The corrections for one engine."""

    trees: dict[str, list[Tree]]  # by latency; their sum is log(measured / roofline)
    known_configs: dict[str, float]  # offset of log TPOT for each measured configuration, by its `config_keys`
    spreads: dict[str, dict[str, Spread]]  # by 'known' or 'new' configuration, then by latency

    def __call__(self, engine: str, times: StepTimes, found: SteadyState) -> Correction:
        """Return the correction at a steady state."""
        row = features(engine, times, found)
        ttft, tpot = (sum(_leaf(tree, row) for tree in self.trees[name]) for name in ("ttft", "tpot"))
        keys = config_keys(times)
        spread = self.spreads["known" if keys[0] in self.known_configs else "new"]
        tpot += sum(self.known_configs.get(key, 0.0) for key in keys)
        return Correction(math.exp(ttft), math.exp(tpot), spread["ttft"], spread["tpot"])


def corrected(engine: str, times: StepTimes, found: SteadyState) -> StepTimes:
    """Return corrected step times, or `times` itself if the device, split or data type was not measured."""
    coefficients, steps = times.coefficients, times.steps
    measured = (
        coefficients.scheme is None
        and times.device.name in coefficients.devices
        and steps.split.pipeline == 1
        and steps.scheme.compute_dtype(times.device.tflops) in FORMATS
    )
    if not measured or not (model := load(engine)):
        return times
    correction = model(engine, times, found)
    spreads = {"ttft": correction.ttft_spread, "tpot": correction.tpot_spread}
    coefficients = coefficients.model_copy(update=spreads)
    better = StepTimes(steps, times.device, coefficients, speculation=times.speculation)
    return better.scaled(prefill=correction.ttft, decode=correction.tpot)


@cache
def load(engine: str) -> ResidualModel | None:
    """Return the residual model of an engine from the catalogue; None if there is none."""
    if engine not in catalog.names("residual"):
        return None
    data = json.loads(catalog.text("residual", engine))
    spreads = {kind: {name: Spread(**one) for name, one in both.items()} for kind, both in data["spreads"].items()}
    return ResidualModel(data["trees"], data["known_configs"], spreads)


def config_keys(times: StepTimes) -> tuple[str, str]:
    """Return the keys of a configuration: model, device and scheme; and the same with the split."""
    shape, scheme = times.steps.shape, times.steps.scheme
    key = f"{shape.depth}x{shape.hidden} {shape.parameters / 1e9:.0f}B {times.device.name} {scheme.name}"
    return key, f"{key} {times.steps.split}"


def features(engine: str, times: StepTimes, found: SteadyState) -> list[float]:
    """Return the inputs of the trees: load, split, and the share of each kind of work in a step.

    They contain no model or device names, so the trees apply to new ones.
    """
    steps, device = times.steps, times.device
    decode, prefill, decode_s, prefill_s = found.decode, found.prefill, found.decode_s, found.prefill_s
    dtype = steps.scheme.compute_dtype(device.tflops)
    flops, bandwidth, link, bf16 = device.flops(dtype), device.bandwidth, device.link, device.flops("bf16")
    log = math.log
    return [
        log(found.concurrency), log(found.prompt), log(found.output),
        log(steps.split.tensor), log(steps.split.data), log(steps.split.expert),
        float(ENGINES.index(engine)), float(FORMATS.index(dtype)), float(steps.shape.experts > 0),
        log(decode.weight_bytes / bandwidth / decode_s), log(decode.kv_bytes / bandwidth / decode_s),
        log(decode.flops / flops / decode_s + 1e-6), log(found.concurrency * prefill_s / found.output / decode_s),
        log(prefill.flops / flops / prefill_s), log(prefill.weight_bytes / bandwidth / prefill_s),
        log(prefill.attention_flops / bf16 / prefill_s + 1e-6), log(decode.all_reduce_bytes / link / decode_s + 1e-4),
        decode.collectives / 100, log(decode.all_to_all_bytes / link / decode_s + 1e-4), log(decode.layers),
        log(bandwidth / flops * 1e3), log(decode_s), log(prefill_s), log(found.concurrency * found.prompt),
    ]  # fmt: skip


def _leaf(tree: Tree | float, row: Sequence[float]) -> float:
    while isinstance(tree, list):
        tree = tree[2] if row[tree[0]] <= tree[1] else tree[3]
    return tree
