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


@pytest.mark.parametrize(("degrees", "quantile"), [(4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (39, 2.023)])
def test_student_t(degrees: int, quantile: float) -> None:
    assert statistics.student_t(degrees, 1.959964) == pytest.approx(quantile, abs=2e-3)  # from printed tables


@pytest.mark.parametrize(("level", "z"), [(0.9, 1.6449), (0.95, 1.96), (0.99, 2.5758)])
def test_z_of(level: float, z: float) -> None:
    assert statistics.z_of(level) == pytest.approx(z, abs=1e-4)


def test_the_interval_of_a_mean() -> None:
    found = statistics.mean_interval([float(number) for number in range(1, 11)])
    assert found.value == 5.5
    assert (found.low, found.high) == pytest.approx((3.334, 7.666), abs=2e-3)  # 5.5 -+ 2.262 * 3.0277 / sqrt(10)
    two = statistics.mean_interval([1.0, 3.0])
    assert two.low < 1.0 and two.high > 3.0 and two.low + two.high == pytest.approx(4.0)


def test_the_interval_of_a_mean_of_batches() -> None:
    """200 rising values in 40 batches of five: the means rise by 5, so their standard error is 5 * 11.69 / sqrt(40)."""
    found = statistics.mean_interval([float(number) for number in range(200)])
    assert found.value == 99.5
    assert found.high - found.value == pytest.approx(2.0227 * 9.242, rel=1e-3)
    # eight batches are used; with seven, the values themselves
    alternating = [float(number % 5) for number in range(40)]
    eight = statistics.mean_interval(alternating)
    assert (eight.low, eight.value, eight.high) == (2.0, 2.0, 2.0)
    assert statistics.mean_interval(alternating[:39]).high > 2.2


def test_batches_have_at_least_five_values() -> None:
    assert statistics.batch_bounds(4) == [(0, 4)]
    assert statistics.batch_bounds(9) == [(0, 9)]
    assert statistics.batch_bounds(11) == [(0, 5), (5, 11)]
    assert len(statistics.batch_bounds(199)) == 39 and len(statistics.batch_bounds(1000)) == 40
    assert statistics.batch_bounds(30, 3) == [(0, 10), (10, 20), (20, 30)]


def test_the_design_effect_of_known_batches() -> None:
    # all or nothing in batches of five: 20 values are worth three
    assert statistics.design_effect([5, 0, 5, 0], [5] * 4) == pytest.approx(4 * 5 * 0.25 / 3 / 0.25)
    assert statistics.design_effect([4, 1, 4, 1, 0], [5, 5, 5, 5, 0]) == pytest.approx(4 * 5 * 0.09 / 4 / 0.25)
    assert statistics.design_effect([5, 0, 5], [5] * 3) == 1.0, "three batches are too few"
    assert statistics.design_effect([1, 1, 1, 1], [5] * 4) == 1.0, "never less than independent samples"
    assert statistics.design_effect([0] * 4, [5] * 4) == 1.0 and statistics.design_effect([5] * 4, [5] * 4) == 1.0
    assert statistics.design_effect([0] * 4, [0] * 4) == 1.0
    assert statistics.design_effect([3, 0, 2, 0], [3, 2, 2, 3]) == pytest.approx((0.75 + 0.5 + 0.5 + 0.75) / 3 / 0.25)


def test_the_effective_sample_size_must_reach_beyond_the_percentile() -> None:
    assert statistics.supported(0.95, 100, 20.001) and not statistics.supported(0.95, 100, 19.9)
    assert statistics.supported(0.05, 100, 20.001) and not statistics.supported(0.05, 99, 99)
    assert [statistics.min_samples(p) for p in (0.5, 0.05, 0.1, 0.999)] == [10, 100, 50, 5000]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.25, 1.0), (0.375, 1.5), (0.0, 1.0), (1.0, 3.0)])
def test_the_kth_of_n_values_has_k_of_n_plus_one_below_it(share: float, value: float) -> None:
    assert statistics._at_rank([1.0, 2.0, 3.0], share) == pytest.approx(value)
    assert statistics._at_rank([7.0], share) == 7.0


def test_draws_of_a_quantile_have_its_standard_error() -> None:
    ordered = [number / 1000 for number in range(1, 1000)]
    draws = statistics.quantile_draws(ordered, 0.9, 100.0, random.Random(5))
    mean = sum(draws) / len(draws)
    spread = math.sqrt(sum((one - mean) ** 2 for one in draws) / len(draws))
    assert len(draws) == 2000
    assert mean == pytest.approx(0.9, abs=0.003) and spread == pytest.approx(math.sqrt(0.09 / 101), rel=0.08)


def test_the_interval_of_a_quantile_contains_it_and_narrows() -> None:
    ordered = [number / 1000 for number in range(1, 1000)]
    wide, narrow = (statistics.quantile_interval(ordered, 0.9, effective) for effective in (50.0, 800.0))
    assert wide.value == narrow.value == pytest.approx(0.8992, abs=1e-3)
    for found, effective in ((wide, 50.0), (narrow, 800.0)):
        reach = 1.96 * math.sqrt(0.09 / (effective + 1))
        assert found.high - found.low == pytest.approx(2 * reach, rel=0.08)
    assert statistics.quantile_interval([3.0] * 50, 0.9, 50) == Interval(3.0, 3.0, 3.0)
    # where the ranks are all on one side of the sample's quantile, the interval still has it
    assert statistics.quantile_interval([0.0, 1.0], 0.5, 2.0).value == 0.5


def test_wilson_without_trials_and_at_other_levels() -> None:
    assert statistics.wilson(0, 0) == Interval(0.0, 0.0, 1.0)
    half, sure = statistics.wilson(50, 100), statistics.wilson(50, 100, z=2.5758)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # from the published formula, by hand
    assert (sure.low, sure.high) == pytest.approx((0.3752, 0.6248), abs=1e-3)
    one = statistics.wilson(1, 10)
    assert (one.low, one.high) == pytest.approx((0.0179, 0.4042), abs=1e-4)


def test_second_half_ratio_of_constant_halves() -> None:
    assert statistics.second_half_ratio([1.0] * 40 + [2.0] * 40) == Interval(2.0, 2.0, 2.0)
    assert statistics.second_half_ratio([2.0] * 20 + [1.0] * 21) == Interval(0.5, 0.5, 0.5)
    assert statistics.second_half_ratio([0.0] * 40 + [2.0] * 40) == Interval(1.0, 1.0, 1.0)
    mixed = [1.0, 3.0] * 50
    wide = statistics.second_half_ratio([value for value in mixed for _ in range(10)])  # 100 batches of equal values
    assert wide.low < 0.6 and wide.high > 1.5


def test_a_paired_ratio_is_symmetric_and_widens_with_the_level() -> None:
    found, swapped = statistics.paired_ratio(80, 10, 5), statistics.paired_ratio(80, 5, 10)
    assert found.value == pytest.approx(85 / 90)
    assert (found.low * swapped.high, found.high * swapped.low) == pytest.approx((1.0, 1.0))
    wald = [85 / 90 * math.exp(sign * 1.96 * math.sqrt(15 / (90 * 85))) for sign in (-1, 1)]
    assert [found.low, found.high] == pytest.approx(wald, abs=4e-3)
    surer = statistics.paired_ratio(80, 10, 5, level=0.99)
    assert surer.low < found.low and surer.high > found.high
    same = statistics.paired_ratio(40, 0, 0)
    assert same.value == 1.0 and same.low < 1.0 < same.high
    assert statistics.paired_ratio(0, 0, 7) == Interval(0.0, 0.0, statistics.UNBOUNDED)
    none = statistics.paired_ratio(0, 9, 0)
    assert none.value == none.low == 0.0 and 0 < none.high < 1
