"""Format numbers, latencies and rates for display."""

from __future__ import annotations

from powerband.core.statistics import Interval


def seconds(value: float) -> str:
    """Format a latency with three significant digits."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 0.001:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.0f} us" if value else "0"


def ranged(estimate: Interval) -> str:
    """Format a latency with its interval, in one unit."""
    scale, unit, digits = (1.0, "s", 2) if estimate.high >= 1 else (1e3, "ms", 1)
    value, low, high = (f"{part * scale:.{digits}f}" for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} {unit} [{low}, {high}]"


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rate(estimate: Interval) -> str:
    """Format a rate with its interval."""
    return f"{number(estimate.value)}/s [{number(estimate.low)}, {number(estimate.high)}]"


def share(estimate: Interval) -> str:
    """Format a share with its interval."""
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
