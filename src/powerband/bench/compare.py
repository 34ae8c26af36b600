"""Do two measurements differ, by how much, and may they be compared at all?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from powerband.core import statistics
from powerband.core.comparison import Comparison, Difference, Say
from powerband.core.measurement import GRID, Distribution, Level, Measurement
from powerband.core.statistics import Interval

MARGIN = 0.01  # a difference within this is none that anybody would act on
RESOLUTION_S = 0.001  # nor is one that is no larger than what the instrument itself may be off
COMPARED = (50.0, 95.0)
_LOADS_ALIKE = 0.02
_TICK_S = 1e-6  # gaps are kept in microseconds, and two contents may come in one read


def compare(first: Measurement, second: Measurement) -> Comparison:
    """Compare the loads that both were measured at; the doubt is shared over everything that is compared."""
    found = Comparison(obstacles=list(_obstacles(first, second)), notes=list(_notes(first, second)))
    pairs = [(one, other) for one in first.levels for other in second.levels if _alike(one, other)]
    pairs = [(one, other) for one, other in pairs if one.valid and other.valid]
    if first.best is not None and second.best is not None and not pairs:
        found.obstacles.append("they were measured at different loads")
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
        found.obstacles.append("they share no load and percentile that both samples support")
    for level, one_side, other_side, metric, name in tests:
        found.differences.append(_difference(level, one_side, other_side, metric, name, doubt=0.05 / len(tests)))
    return found


def _difference(
    level: Level, first: Distribution, second: Distribution, metric: str, name: str, *, doubt: float
) -> Difference:
    p, rng = float(name[1:]) / 100, random.Random(f"{metric} {name}")
    early, late = (_draws(side, p, rng, doubt) for side in (first, second))
    ratios = sorted(b / max(a, _TICK_S) for a, b in zip(early, late, strict=True))
    gaps = sorted(b - a for a, b in zip(early, late, strict=True))
    low, high = statistics.quantile(ratios, doubt / 2), statistics.quantile(ratios, 1 - doubt / 2)
    values = first.percentiles[name].value, second.percentiles[name].value
    says: Say = "same"
    if low > 1 + MARGIN and statistics.quantile(gaps, doubt / 2) > RESOLUTION_S:
        says = "slower"
    elif high < 1 - MARGIN and statistics.quantile(gaps, 1 - doubt / 2) < -RESOLUTION_S:
        says = "faster"
    return Difference(level.load, metric, name, *values, Interval(values[1] / max(values[0], _TICK_S), low, high), says)


def _draws(side: Distribution, p: float, rng: random.Random, doubt: float) -> list[float]:
    """Draw from the bootstrap of a quantile, off the kept quantile function."""
    count = max(2000, round(40 / doubt))
    rank = p * side.effective
    return [_at(side.grid, rng.betavariate(rank, side.effective - rank)) for _ in range(count)]


def _at(grid: Sequence[float], share: float) -> float:
    """Return the kept quantile function at a share."""
    place = min(int(share * 100), 99)  # the grid is even up to 0.99
    while place + 2 < len(GRID) and GRID[place + 1] < share:
        place += 1
    low, high = GRID[place], GRID[place + 1]
    return grid[place] + (grid[place + 1] - grid[place]) * (share - low) / (high - low)


def _alike(one: Level, other: Level) -> bool:
    if one.users or other.users:
        return one.users == other.users
    a, b = one.rate_per_s or 0.0, other.rate_per_s or 0.0
    return abs(a - b) <= _LOADS_ALIKE * max(a, b)


def _obstacles(first: Measurement, second: Measurement) -> list[str]:
    found = []
    for name, one in (("first", first), ("second", second)):
        if not one.valid:
            found.append(f"the {name} is not valid")
    plain = [
        one.workload.model_copy(update={"seed": 0, "arrivals": first.workload.arrivals}) for one in (first, second)
    ]
    if plain[0].digest() != plain[1].digest():
        found.append("they were measured with different workloads")
    return found


def _notes(first: Measurement, second: Measurement) -> list[str]:
    found = []
    for key in ("model", "engine", "engine_version", "client", "machine"):
        one, other = first.provenance.get(key), second.provenance.get(key)
        if one != other:
            found.append(f"{key.replace('_', ' ')}: {one} and {other}")
    return found
