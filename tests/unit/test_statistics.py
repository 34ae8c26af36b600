"""Coverage of confidence intervals, on samples with a known distribution."""

import math
import random
from array import array

import pytest

from powerband.core import counting, statistics
from powerband.core.statistics import Interval


@pytest.mark.parametrize(("p", "count"), [(0.5, 60), (0.95, 100), (0.95, 1000), (0.99, 700)])
def test_percentile_intervals_have_95_percent_coverage(p: float, count: int) -> None:
    rng, truth, covered = random.Random(1), -math.log(1 - p), 0
    for _ in range(400):
        ordered = sorted(rng.expovariate(1) for _ in range(count))
        interval = statistics.quantile_interval(ordered, p, count)
        covered += interval.low <= truth <= interval.high
    assert 0.93 <= covered / 400 <= 0.985


def test_autocorrelation_reduces_the_effective_sample_size() -> None:
    rng = random.Random(2)
    level, values = 0.0, []
    for _ in range(2000):
        level = 0.95 * level + rng.gauss(0, 1)
        values.append(level)
    bounds = statistics.batch_bounds(len(values))
    beyond = [sum(value > 0 for value in values[begin:end]) for begin, end in bounds]
    sizes = [end - begin for begin, end in bounds]
    assert statistics.design_effect(beyond, sizes) > 5
    rng.shuffle(values)
    beyond = [sum(value > 0 for value in values[begin:end]) for begin, end in bounds]
    assert statistics.design_effect(beyond, sizes) < 2


def test_a_percentile_needs_a_minimum_of_samples() -> None:
    assert statistics.min_samples(0.95) == 100
    assert statistics.min_samples(0.99) == 500
    assert not statistics.supported(0.99, 499, 499)
    assert statistics.supported(0.99, 500, 500)
    assert not statistics.supported(0.99, 5000, 90), "fewer than one effective sample beyond the percentile"


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(95, 100, 0.8882, 0.9785), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)],  # from the published formula, by hand
)
def test_wilson(successes: int, count: int, low: float, high: float) -> None:
    found = statistics.wilson(successes, count)
    assert found.low == pytest.approx(low, abs=1e-3)
    assert found.high == pytest.approx(high, abs=1e-3)


def test_quantiles_are_interpolated() -> None:
    assert statistics.quantile([1, 2, 3, 4], 0.5) == 2.5
    assert statistics.quantile([1, 2, 3, 4], 1.0) == 4
    assert statistics.quantile([7], 0.3) == 7


def test_second_half_ratio_detects_drift_and_not_noise() -> None:
    rng = random.Random(3)
    steady = [rng.expovariate(1) + 1 for _ in range(400)]
    ratio = statistics.second_half_ratio(steady)
    assert ratio.low < 1 < ratio.high
    drifting = [value * (1 + number / 400) for number, value in enumerate(steady)]
    assert statistics.second_half_ratio(drifting).low > 1.2


def test_the_mean_of_few_values_has_an_interval() -> None:
    found = statistics.mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.low < 1.0 and found.high > 3.0
    assert statistics.mean_interval([5.0]) == Interval(5.0, 5.0, 5.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_and_python_counting_agree(monkeypatch: pytest.MonkeyPatch, *, compiled: bool) -> None:
    assert counting._compiled is not None, "this machine has a compiler, so it must be compiled"
    if not compiled:
        monkeypatch.setattr(counting, "_compiled", None)
    values = array("I", [(number * 2654435761) % 2**32 for number in range(10_000)])
    ends = array("q", [100, 100, 5000, 10_000])
    spans = ((0, 100), (100, 100), (100, 5000), (5000, 10_000))
    expected = [len([value for value in values[begin:end] if value > 10**9]) for begin, end in spans]
    assert counting.count_above(values, ends, 10**9) == expected
    ordered = sorted(values)
    counting.sort_u32(values)
    assert list(values) == ordered
