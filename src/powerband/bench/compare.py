"""Compare two measurements: whether they are comparable, and which percentiles differ significantly."""

from __future__ import annotations

import random
from collections.abc import Sequence

from powerband.core import statistics
from powerband.core.comparison import Comparison, Difference, DifferenceVerdict
from powerband.core.measurement import GRID, Distribution, Level, Measurement
from powerband.core.statistics import Interval

MARGIN = 0.01  # smaller relative differences count as equal
RESOLUTION_S = 0.001  # so do smaller absolute differences: the measurement error of the client
COMPARED = (50.0, 95.0)  # percentiles
_FAMILY_ERROR = 0.05  # probability of any false difference, over all comparisons
_SAME_LOAD = 0.02  # relative difference of rates
_TICK_S = 1e-6  # gaps are stored in microseconds, and two content events may arrive in one read


def compare(first: Measurement, second: Measurement) -> Comparison:
    """Compare the levels at the same load, with a Bonferroni correction over all comparisons."""
    found = Comparison(obstacles=list(_obstacles(first, second)), notes=list(_notes(first, second)))
    pairs = [(one, other) for one in first.levels for other in second.levels if _same_load(one, other)]
    pairs = [(one, other) for one, other in pairs if one.valid and other.valid]
    if first.best is not None and second.best is not None and not pairs:
        found.obstacles.append("the measurements were taken at different loads")
    tests = [
        (one, one.latencies[metric], other.latencies[metric], metric, f"p{percentile:g}")
        for one, other in pairs
        for metric in one.latencies
        if metric in other.latencies
        for percentile in COMPARED
        if f"p{percentile:g}" in one.latencies[metric].percentiles
        and f"p{percentile:g}" in other.latencies[metric].percentiles
    ]
    if not tests and not found.obstacles:
        found.obstacles.append("no load has a percentile that both measurements have enough samples for")
    for level, one_side, other_side, metric, name in tests:
        alpha = _FAMILY_ERROR / len(tests)
        found.differences.append(_difference(level, one_side, other_side, metric, name, alpha=alpha))
    return found


def _difference(
    level: Level, first: Distribution, second: Distribution, metric: str, name: str, *, alpha: float
) -> Difference:
    p, rng = float(name[1:]) / 100, random.Random(f"{metric} {name}")
    early, late = (_draws(side, p, rng, alpha) for side in (first, second))
    ratios = sorted([b / (a if a > _TICK_S else _TICK_S) for a, b in zip(early, late, strict=True)])
    low, high = statistics.quantile(ratios, alpha / 2), statistics.quantile(ratios, 1 - alpha / 2)
    values = first.percentiles[name].value, second.percentiles[name].value
    verdict: DifferenceVerdict = "same"
    if low > 1 + MARGIN or high < 1 - MARGIN:
        gaps = sorted([b - a for a, b in zip(early, late, strict=True)])
        if low > 1 + MARGIN and statistics.quantile(gaps, alpha / 2) > RESOLUTION_S:
            verdict = "slower"
        elif high < 1 - MARGIN and statistics.quantile(gaps, 1 - alpha / 2) < -RESOLUTION_S:
            verdict = "faster"
    ratio = Interval(values[1] / max(values[0], _TICK_S), low, high)
    return Difference(level.load, metric, name, *values, ratio, verdict)


def _draws(side: Distribution, p: float, rng: random.Random, alpha: float) -> list[float]:
    """Draw from the bootstrap distribution of a quantile, using the stored quantile function."""
    count = max(2000, round(40 / alpha))
    rank = p * side.effective
    return [_at(side.grid, rng.betavariate(rank, side.effective - rank)) for _ in range(count)]


def _at(grid: Sequence[float], share: float) -> float:
    """Return the stored quantile function at a share, with linear interpolation."""
    index = min(int(share * 100), 99)  # the grid is evenly spaced up to 0.99
    while index + 2 < len(GRID) and GRID[index + 1] < share:
        index += 1
    low, high = GRID[index], GRID[index + 1]
    return grid[index] + (grid[index + 1] - grid[index]) * (share - low) / (high - low)


def _same_load(one: Level, other: Level) -> bool:
    if one.users or other.users:
        return one.users == other.users
    a, b = one.rate_per_s or 0.0, other.rate_per_s or 0.0
    return abs(a - b) <= _SAME_LOAD * max(a, b)


def _obstacles(first: Measurement, second: Measurement) -> list[str]:
    found = []
    for name, one in (("first", first), ("second", second)):
        if not one.valid:
            found.append(f"the {name} measurement is not valid")
    normalized = [
        one.workload.model_copy(update={"seed": 0, "arrivals": first.workload.arrivals}) for one in (first, second)
    ]
    if normalized[0].digest() != normalized[1].digest():
        found.append("the measurements used different workloads")
    return found


def _notes(first: Measurement, second: Measurement) -> list[str]:
    found = []
    for key in ("model", "engine", "engine_version", "client", "machine"):
        one, other = first.provenance.get(key), second.provenance.get(key)
        if one != other:
            found.append(f"{key.replace('_', ' ')}: {one} -> {other}")
    return found
