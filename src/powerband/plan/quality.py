"""What published and own measurements let one expect of an option's quality: a prior for `plan`, not a proof."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from powerband.core.evidence import ExpectedFigure, ExpectedQuality, Outlook, QualityRecord, Unit
from powerband.core.model import Model
from powerband.core.quality import Bound, QualityFloor
from powerband.core.statistics import Interval
from powerband.store import evidence
from powerband.store.evidence import Sourced

_FIGURES: dict[Unit, str] = {"mean-kl": "kl_mean", "same-top": "top1_agreement", "ppl-ratio": "perplexity_ratio"}
_SAME_MODEL, _HERE, _UNLIKE = 4.0, 16.0, 0.5  # factors of a record's weight
_NEAR = 2.0  # a model with up to this many times more or fewer parameters is similar
_LONG_PROMPT, _LONG_ANSWER = 8192, 1500  # tokens from which long-context and reasoning records matter
_WORTH_A_WARNING = 0.97  # recovery


@dataclass(frozen=True)
class Prior:
    """The evidence for one model and its traffic, against a floor."""

    model: Model
    floor: QualityFloor | None
    longest_tokens: float
    output_tokens: float

    def expected(self, engine: str, scheme: str, kv_format: str) -> ExpectedQuality:
        """Return what the evidence says about weights and KV cache together."""
        parts = [
            [one for one in self._known if _is(one, engine, scheme=name, kv_format=kv)]
            for name, kv in ((scheme, ""), ("", kv_format))
            if (name or kv) not in evidence.LOSSLESS
        ]
        if not parts:
            return ExpectedQuality(outlook="not quantized")
        if both := [one for one in self._known if one.here and one.scheme == scheme and one.kv_format == kv_format]:
            own = [one for one in both if self._is_this_model(one.record) and one.record.engine == engine]
            parts = [own] if own else parts
        general = [[one for one in part if one.record.task in ("general", "text")] or part for part in parts]
        figures = [_together([self._figure(unit, part) for part in general]) for unit in ("recovery", *_FIGURES)]
        found = tuple(one for one in figures if one)
        used = [one for part in general for one in part]
        return ExpectedQuality(
            outlook=self._outlook(found),
            figures=found,
            likeness=self._likeness(used) if found else "",
            warnings=tuple(self._warnings([one for part in parts for one in part])),
            sources=self._sources(used) if found else (),
        )

    @cached_property
    def _known(self) -> list[Sourced]:
        return [*evidence.published(), *evidence.measured_here()]

    def _weight(self, one: Sourced) -> float:
        """Return how much a record counts: less for a model of another size or kind, more for this one."""
        weight: float = 0.5 ** abs(math.log2(one.record.parameters / self._parameters))
        weight *= 1.0 if one.record.experts == bool(self.model.experts) else _UNLIKE
        weight *= _SAME_MODEL if self._is_this_model(one.record) else 1.0
        return weight * (_HERE if one.here and self._is_this_model(one.record) else 1.0)

    @property
    def _parameters(self) -> float:
        assert self.model.shape is not None
        return self.model.shape.parameters / 1e9

    def _is_this_model(self, record: QualityRecord) -> bool:
        return record.model.rpartition("/")[2].lower() == self.model.name.lower()

    def _figure(self, unit: Unit, known: Sequence[Sourced]) -> ExpectedFigure | None:
        """Return the weighted mean of a figure with its spread: that of the records, and that within each of them."""
        able = [one for one in known if one.record.unit == unit]
        if not able:
            return None
        weights = [self._weight(one) for one in able]
        mean = sum(w * one.record.value for w, one in zip(weights, able, strict=True)) / sum(weights)
        lows, highs = ([_bound(one.record, low=low) for one in able] for low in (True, False))
        spread = [
            math.sqrt(sum(w * (min(0.0, end - mean) if low else max(0.0, end - mean)) ** 2
                          for w, end in zip(weights, ends, strict=True)) / sum(weights))
            for low, ends in ((True, lows), (False, highs))
        ]  # fmt: skip
        worst = min(lows) if unit in ("recovery", "same-top") else max(highs)
        return ExpectedFigure(
            unit=unit, expected=Interval(mean, mean - spread[0], mean + spread[1]), worst=worst, records=len(able)
        )

    def _outlook(self, figures: Sequence[ExpectedFigure]) -> Outlook:
        """Return whether the floor will be kept: one figure beyond its bound is enough to make that unlikely."""
        bounds = [(one, bound) for one in figures if (bound := self._bound_of(one.unit))]
        if not bounds:
            return "unknown"
        if any(bound.judge(_point(one.expected.value)) == "fail" for one, bound in bounds):
            return "unlikely"
        return "likely" if all(bound.judge(one.expected) == "pass" for one, bound in bounds) else "uncertain"

    def _bound_of(self, unit: Unit) -> Bound | None:
        if self.floor is None:
            return None
        return self.floor.expected_recovery if unit == "recovery" else self.floor.fidelity.get(_FIGURES[unit])

    def _likeness(self, used: Sequence[Sourced]) -> str:
        same = [one for one in used if self._is_this_model(one.record)]
        if same:
            return "this model, evaluated here" if any(one.here for one in same) else "this model"
        sizes = sorted({one.record.parameters for one in used})
        nearest = min(sizes, key=lambda one: abs(math.log(one / self._parameters)))
        near = 1 / _NEAR <= nearest / self._parameters <= _NEAR
        kind = any(one.record.experts == bool(self.model.experts) for one in used)
        listed = f"{sizes[0]:g}B" if len(sizes) == 1 else f"{sizes[0]:g}B to {sizes[-1]:g}B"
        other = "" if kind else ", none of them " + ("a mixture of experts" if self.model.experts else "dense")
        return f"{'similar' if near and kind else 'other'} models of {listed}{other}"

    def _sources(self, used: Sequence[Sourced]) -> tuple[str, ...]:
        """Return the sources, those of the most similar models first."""
        return tuple(dict.fromkeys(one.source for one in sorted(used, key=lambda one: -self._weight(one))))

    def _warnings(self, known: Sequence[Sourced]) -> Iterable[str]:
        wanted = {
            "long-context": self.longest_tokens >= _LONG_PROMPT,
            "reasoning": self.output_tokens >= _LONG_ANSWER,
        }
        for task, matters in wanted.items():
            able = [one.record for one in known if one.record.task == task and one.record.unit == "recovery"]
            bad = min(able, key=_lowest, default=None)
            if matters and bad and _lowest(bad) < _WORTH_A_WARNING:
                where = f"{bad.worst or bad.benchmark}, {bad.parameters:g}B"
                yield f"{task} tasks: {_lowest(bad):.0%} of the score was left in the worst case ({where})"


def _is(one: Sourced, engine: str, *, scheme: str, kv_format: str) -> bool:
    return one.scheme == scheme and one.kv_format == kv_format and one.record.engine in ("", engine)


def _lowest(record: QualityRecord) -> float:
    return min(record.value, record.low if record.low is not None else record.value)


def _bound(record: QualityRecord, *, low: bool) -> float:
    end = record.low if low else record.high
    return record.value if end is None else end


def _point(value: float) -> Interval:
    return Interval(value, value, value)


def _together(parts: Sequence[ExpectedFigure | None]) -> ExpectedFigure | None:
    """Return a figure of weights and KV cache together: losses add up; None if one of them has no such figure."""
    found = [one for one in parts if one]
    if len(found) < len(parts):
        return None
    if len(found) == 1:
        return found[0]
    unit = found[0].unit

    def joined(values: Sequence[float]) -> float:
        return sum(values) if unit == "mean-kl" else math.prod(values)

    return ExpectedFigure(
        unit=unit,
        expected=Interval(
            joined([one.expected.value for one in found]),
            joined([one.expected.low for one in found]),
            joined([one.expected.high for one in found]),
        ),
        worst=joined([one.worst for one in found]),
        records=sum(one.records for one in found),
    )
