"""Numbers with their doubt: percentiles, intervals and tests, on plain sequences.

The bootstrap of a sample quantile needs no resampling: the rank of a resample's quantile follows a Beta law, so drawing
ranks from it draws from the bootstrap itself, at any sample size. Requests that follow each other are not independent;
`design_effect` measures by how much, and the sample counts for that much less.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
BATCHES = 40
_LEAST_BEYOND = 5.0  # samples that must lie beyond a percentile on either side
_LEAST_INDEPENDENT = 1.0  # and so many independent ones; the interval tells the rest
_DRAWS = 2000
_LEAST_LUMPS = 8
_Z95 = 1.959964
UNBOUND = 1e9  # the end of an interval that has none; a file wants a number


@dataclass(frozen=True)
class Interval:
    """A figure and the interval around it, of 95 % unless another level was asked for."""

    value: float
    low: float
    high: float


def quantile(ordered: Sequence[float], p: float) -> float:
    """Return the p-quantile of sorted values, interpolated between neighbours."""
    place = p * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return float(ordered[-1])
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)


def _at_rank(ordered: Sequence[float], share: float) -> float:
    """Return where a share of the whole population is expected to lie below: the k-th of n stands for k / (n + 1)."""
    place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    return quantile(ordered, place / (len(ordered) - 1)) if len(ordered) > 1 else float(ordered[0])


def supported(p: float, count: int, effective: float) -> bool:
    """Tell whether so many samples, worth so many independent ones, say anything about the p-quantile."""
    beyond = min(p, 1 - p)
    return count >= needed(p) and effective * beyond >= _LEAST_INDEPENDENT


def needed(p: float) -> int:
    """Return how many samples the p-quantile needs."""
    return math.ceil(_LEAST_BEYOND / min(p, 1 - p) - 1e-9)


def quantile_draws(ordered: Sequence[float], p: float, effective: float, rng: random.Random) -> list[float]:
    """Draw from the bootstrap distribution of the p-quantile."""
    rank = p * effective
    return [_at_rank(ordered, rng.betavariate(rank, effective - rank)) for _ in range(_DRAWS)]


def quantile_interval(ordered: Sequence[float], p: float, effective: float) -> Interval:
    """Return the p-quantile of sorted values with its bootstrap interval."""
    rank, rng = p * effective, random.Random(0)
    at = sorted(rng.betavariate(rank, effective - rank) for _ in range(_DRAWS))
    value = quantile(ordered, p)
    low, high = _at_rank(ordered, quantile(at, 0.025)), _at_rank(ordered, quantile(at, 0.975))
    return Interval(value, min(low, value), max(high, value))


def mean_interval(values: Sequence[float], lumps: int = BATCHES) -> Interval:
    """Return the mean with an interval from the means of consecutive lumps."""
    count = len(values)
    mean = math.fsum(values) / count
    bounds = batch_bounds(count, lumps)
    parts = [values[begin:end] for begin, end in bounds] if len(bounds) >= _LEAST_LUMPS else [[one] for one in values]
    means = [math.fsum(part) / len(part) for part in parts]
    if len(means) < 2:
        return Interval(mean, mean, mean)
    spread = math.sqrt(sum((one - mean) ** 2 for one in means) / (len(means) - 1) / len(means))
    reach = student(len(means) - 1, _Z95) * spread
    return Interval(mean, mean - reach, mean + reach)


def student(freedom: int, z: float) -> float:
    """Return the point of Student's t that stands for a normal law's z, by its series in 1 / freedom."""
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def batch_bounds(count: int, lumps: int = BATCHES) -> list[tuple[int, int]]:
    """Cut a sequence into consecutive lumps of nearly the same size, at least five values each."""
    lumps = max(1, min(lumps, count // 5))
    edges = [count * number // lumps for number in range(lumps + 1)]
    return list(pairwise(edges))


def design_effect(beyond: Sequence[int], sizes: Sequence[int]) -> float:
    """Return how much more the share beyond a bound varies from lump to lump than independent samples would."""
    total = sum(sizes)
    share = sum(beyond) / total if total else 0.0
    if len(sizes) < 4 or not 0 < share < 1:
        return 1.0
    deviations = sum(size * (part / size - share) ** 2 for part, size in zip(beyond, sizes, strict=True) if size) / (
        len(sizes) - 1
    )
    return max(1.0, deviations / (share * (1 - share)))


def z_of(level: float) -> float:
    """Return how many standard deviations hold that share of a normal law."""
    return NormalDist().inv_cdf((1 + level) / 2)


def wilson(successes: float, count: float, *, z: float = _Z95) -> Interval:
    """Return a share with Wilson's interval."""
    if count <= 0:
        return Interval(0.0, 0.0, 1.0)
    share, z2 = successes / count, z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = middle - reach if successes > 0 else 0.0, middle + reach if successes < count else 1.0
    return Interval(share, max(0.0, low), min(1.0, high))


def halves(values: Sequence[float]) -> Interval:
    """Return the median of the second half over that of the first, with a bootstrap interval that knows of lumps."""
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
    """Return successes of the second over those of the first on the same trials, with Bonett and Price's interval.

    Given are the trials in which both, only the first, and only the second succeeded. A bootstrap would be sure of
    itself where the two never differed; this is not. (J. Educ. Behav. Stat. 31 (2006) 479.)
    """
    ours, theirs, seen = both + first, both + second, both + first + second
    if not ours:
        return Interval(0.0, 0.0, UNBOUND)
    shared = math.sqrt((first + second + 2) / ((ours + 1) * (theirs + 1)))
    alone = sum(math.sqrt((1 - (one + 1) / (seen + 2)) / (one + 1)) for one in (ours, theirs))
    z = z_of(level) * shared / alone
    low, high = wilson(ours, seen, z=z), wilson(theirs, seen, z=z)
    return Interval(theirs / ours, high.low / low.high, high.high / low.low if low.low else UNBOUND)
