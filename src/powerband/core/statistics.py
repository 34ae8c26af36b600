"""Percentiles and means with confidence intervals, and tests, on plain sequences.

The bootstrap of a sample quantile needs no resampling: the rank of a resample's quantile follows a Beta distribution,
so ranks drawn from it give the bootstrap distribution at any sample size. Consecutive requests are not independent:
`design_effect` estimates by how much from batches of consecutive values, and the effective sample size is the count
divided by it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
BATCHES = 40
_MIN_BEYOND = 5.0  # samples required on each side of a percentile
_MIN_INDEPENDENT = 1.0  # effective samples required there; the interval shows the remaining uncertainty
_DRAWS = 2000
_MIN_BATCHES = 8
_Z95 = 1.959964
UNBOUNDED = 1e9  # end of an unbounded interval: JSON has no infinity


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; 95 % unless stated otherwise."""

    value: float
    low: float
    high: float


def quantile(ordered: Sequence[float], p: float) -> float:
    """Return the p-quantile of sorted values, with linear interpolation."""
    position = p * (len(ordered) - 1)
    below = int(position)
    if below + 1 >= len(ordered):
        return float(ordered[-1])
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (position - below)


def _at_rank(ordered: Sequence[float], share: float) -> float:
    """Return the value that a share of the population is expected below: the k-th of n estimates k / (n + 1)."""
    position = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    return quantile(ordered, position / (len(ordered) - 1)) if len(ordered) > 1 else float(ordered[0])


def supported(p: float, count: int, effective: float) -> bool:
    """Return whether `count` samples, with this effective sample size, can estimate the p-quantile."""
    beyond = min(p, 1 - p)
    return count >= min_samples(p) and effective * beyond >= _MIN_INDEPENDENT


def min_samples(p: float) -> int:
    """Return the minimum number of samples for the p-quantile."""
    return math.ceil(_MIN_BEYOND / min(p, 1 - p) - 1e-9)


def quantile_draws(ordered: Sequence[float], p: float, effective: float, rng: random.Random) -> list[float]:
    """Draw from the bootstrap distribution of the p-quantile."""
    rank = p * effective
    return [_at_rank(ordered, rng.betavariate(rank, effective - rank)) for _ in range(_DRAWS)]


def quantile_interval(ordered: Sequence[float], p: float, effective: float) -> Interval:
    """Return the p-quantile of sorted values with its bootstrap interval."""
    value, (low_share, high_share) = quantile(ordered, p), _share_range(p * effective, effective)
    low, high = _at_rank(ordered, low_share), _at_rank(ordered, high_share)
    return Interval(value, min(low, value), max(high, value))


@lru_cache(1024)
def _share_range(rank: float, effective: float) -> tuple[float, float]:
    """Return the 95 % interval of the share of the population below a rank of the sample."""
    rng = random.Random(0)
    at = sorted(rng.betavariate(rank, effective - rank) for _ in range(_DRAWS))
    return quantile(at, 0.025), quantile(at, 0.975)


def mean_interval(values: Sequence[float], batches: int = BATCHES) -> Interval:
    """Return the mean with its interval by the batch-means method."""
    count = len(values)
    mean = math.fsum(values) / count
    bounds = batch_bounds(count, batches)
    parts = [values[begin:end] for begin, end in bounds] if len(bounds) >= _MIN_BATCHES else [[one] for one in values]
    means = [math.fsum(part) / len(part) for part in parts]
    if len(means) < 2:
        return Interval(mean, mean, mean)
    spread = math.sqrt(sum((one - mean) ** 2 for one in means) / (len(means) - 1) / len(means))
    reach = student_t(len(means) - 1, _Z95) * spread
    return Interval(mean, mean - reach, mean + reach)


def student_t(degrees: int, z: float) -> float:
    """Return the Student's t quantile that corresponds to a normal quantile z, by its series in 1 / degrees."""
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def batch_bounds(count: int, batches: int = BATCHES) -> list[tuple[int, int]]:
    """Split a sequence into consecutive batches of nearly equal size, with at least five values each."""
    batches = max(1, min(batches, count // 5))
    edges = [count * number // batches for number in range(batches + 1)]
    return list(pairwise(edges))


def design_effect(beyond: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the variance of the share beyond a bound between batches, relative to independent samples."""
    total = sum(sizes)
    share = sum(beyond) / total if total else 0.0
    if len(sizes) < 4 or not 0 < share < 1:
        return 1.0
    deviations = sum(size * (part / size - share) ** 2 for part, size in zip(beyond, sizes, strict=True) if size) / (
        len(sizes) - 1
    )
    return max(1.0, deviations / (share * (1 - share)))


def z_of(level: float) -> float:
    """Return the normal quantile of a two-sided confidence level, such as 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + level) / 2)


def wilson(successes: float, count: float, *, z: float = _Z95) -> Interval:
    """Return a share with its Wilson score interval."""
    if count <= 0:
        return Interval(0.0, 0.0, 1.0)
    share, z2 = successes / count, z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = middle - reach if successes > 0 else 0.0, middle + reach if successes < count else 1.0
    return Interval(share, max(0.0, low), min(1.0, high))


def second_half_ratio(values: Sequence[float]) -> Interval:
    """Return the median of the second half divided by that of the first, with a bootstrap interval."""
    middle = len(values) // 2
    sides = [values[:middle], values[middle:]]
    rng, draws = random.Random(0), []
    for side in sides:
        ordered = sorted(side)
        median = quantile(ordered, 0.5)
        bounds = batch_bounds(len(side), BATCHES // 2)
        beyond = [sum(value > median for value in side[begin:end]) for begin, end in bounds]
        effect = design_effect(beyond, [end - begin for begin, end in bounds])
        draws.append((median, quantile_draws(ordered, 0.5, max(4.0, len(side) / effect), rng)))
    ratios = sorted(late / early for early, late in zip(draws[0][1], draws[1][1], strict=True) if early > 0)
    if not ratios:
        return Interval(1.0, 1.0, 1.0)
    return Interval(draws[1][0] / draws[0][0], quantile(ratios, 0.025), quantile(ratios, 0.975))


def paired_ratio(both: int, first: int, second: int, *, level: float = 0.95) -> Interval:
    """Return the ratio of the second's successes to the first's on the same trials, with Bonett and Price's interval.

    `both`, `first` and `second` count the trials in which both, only the first, and only the second succeeded. Where
    the two never differ, a bootstrap interval would have zero width; this one does not. (J. Educ. Behav. Stat. 31
    (2006) 479.)
    """
    firsts, seconds, total = both + first, both + second, both + first + second
    if not firsts:
        return Interval(0.0, 0.0, UNBOUNDED)
    paired = math.sqrt((first + second + 2) / ((firsts + 1) * (seconds + 1)))
    unpaired = sum(math.sqrt((1 - (one + 1) / (total + 2)) / (one + 1)) for one in (firsts, seconds))
    z = z_of(level) * paired / unpaired
    low, high = wilson(firsts, total, z=z), wilson(seconds, total, z=z)
    return Interval(seconds / firsts, high.low / low.high, high.high / low.low if low.low else UNBOUNDED)
