"""What the roofline leaves: learned from measured rows as boosted trees, kept as data, added up in plain Python."""

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

ENGINES = ("vllm", "sglang", "trtllm")  # in the order in which a tree knows them
FORMATS = ("bf16", "fp8", "fp4")
Tree = list[Any]  # [feature, threshold, left, right] down to numbers


class Correction(NamedTuple):
    """By which factors the roofline is off, and how far off that leaves it."""

    ttft: float
    tpot: float
    ttft_spread: Spread
    tpot_spread: Spread


@dataclass(frozen=True)
class ResidualModel:
    """What measured rows teach of an engine."""

    trees: dict[str, list[Tree]]  # by latency; a logarithm of measured / roofline
    known_configs: dict[
        str, float
    ]  # what is left of time per token where the very model, device and split were measured
    spreads: dict[str, dict[str, Spread]]  # by 'known' or 'new' cell, then by latency

    def __call__(self, engine: str, times: StepTimes, found: SteadyState) -> Correction:
        """Return the factors at a working point."""
        row = features(engine, times, found)
        ttft, tpot = (sum(_leaf(tree, row) for tree in self.trees[name]) for name in ("ttft", "tpot"))
        names = known_configs(times)
        spread = self.spreads["known" if names[0] in self.known_configs else "new"]
        tpot += sum(self.known_configs.get(name, 0.0) for name in names)
        return Correction(math.exp(ttft), math.exp(tpot), spread["ttft"], spread["tpot"])


def corrected(engine: str, times: StepTimes, found: SteadyState) -> StepTimes:
    """Return the step times as measured rows correct them, where a device and a split like these were measured."""
    own, steps = times.coefficients, times.steps
    measured = own.scheme is None and times.device.name in own.devices and steps.split.pipeline == 1
    if (
        not measured
        or steps.scheme.multiplies_in(times.device.tflops) not in FORMATS
        or not (taught := learned(engine))
    ):
        return times
    found_off = taught(engine, times, found)
    spreads = {"ttft": found_off.ttft_spread, "tpot": found_off.tpot_spread}
    better = StepTimes(steps, times.device, own.model_copy(update=spreads), drafting=times.drafting)
    return better.scaled(prompt=found_off.ttft, token=found_off.tpot)


@cache
def learned(engine: str) -> ResidualModel | None:
    """Return what the catalogue knows of an engine."""
    if engine not in catalog.names("residual"):
        return None
    data = json.loads(catalog.text("residual", engine))
    spreads = {kind: {name: Spread(**one) for name, one in both.items()} for kind, both in data["spreads"].items()}
    return ResidualModel(data["trees"], data["known_configs"], spreads)


def known_configs(times: StepTimes) -> tuple[str, str]:
    """Return the names of a model on a device in a number format, and of that with its split."""
    shape, scheme = times.steps.shape, times.steps.scheme
    whole = f"{shape.depth}x{shape.hidden} {shape.parameters / 1e9:.0f}B {times.device.name} {scheme.name}"
    return whole, f"{whole} {times.steps.split}"


def features(engine: str, times: StepTimes, found: SteadyState) -> list[float]:
    """What the rest is learned from: loads, splits, and which part of a step each kind of work is. No names."""
    steps, device = times.steps, times.device
    write, read, step, prompt = found.writing, found.reading, found.writing_s, found.reading_s
    number_format = steps.scheme.multiplies_in(device.tflops)
    flops, bandwidth, link, bf16 = device.flops(number_format), device.bandwidth, device.link, device.flops("bf16")
    log = math.log
    return [
        log(found.users), log(found.prompt), log(found.output),
        log(steps.split.tensor), log(steps.split.data), log(steps.split.expert),
        float(ENGINES.index(engine)), float(FORMATS.index(number_format)), float(steps.shape.experts > 0),
        log(write.weight_bytes / bandwidth / step), log(write.kv_bytes / bandwidth / step),
        log(write.flops / flops / step + 1e-6), log(found.users * prompt / found.output / step),
        log(read.flops / flops / prompt), log(read.weight_bytes / bandwidth / prompt),
        log(read.attention_flops / bf16 / prompt + 1e-6), log(write.reduce_bytes / link / step + 1e-4),
        write.rounds / 100, log(write.exchange_bytes / link / step + 1e-4), log(write.layers),
        log(bandwidth / flops * 1e3), log(step), log(prompt), log(found.users * found.prompt),
    ]  # fmt: skip


def _leaf(tree: Tree | float, row: Sequence[float]) -> float:
    while isinstance(tree, list):
        tree = tree[2] if row[tree[0]] <= tree[1] else tree[3]
    return tree
