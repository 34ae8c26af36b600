"""Render a rehearsal for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from powerband.core.rehearsal import Rehearsal
from powerband.core.statistics import Interval
from powerband.core.study import render_settings
from powerband.core.units import about_duration
from powerband.reports import format


def parts(found: Rehearsal) -> Iterator[Text | Table]:
    """Yield the rehearsal's figures, and what they assume."""
    yield Text(found.first_line)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    duration, looked = found.duration_s, sorted(one.looked for one in found.plays)
    span = f"{about_duration(duration.value)} [{about_duration(duration.low)}, {about_duration(duration.high)}]"
    table.add_row("duration", f"{span}; {looked[0]} to {looked[-1]} configurations started")
    hours = format.number(found.device_hours.value)
    table.add_row("cost", f"{_usd(found.usd)}: {hours} device-hours at ${found.usd_per_h:.2f}")
    cost = f"{_usd(found.usd_per_1m_requests)} per 1M requests"
    table.add_row("recipe", f"max rate {format.rate(found.max_rate_per_s)}, {cost}")
    plays = len(found.plays)
    near = f"in {found.near_best} of {plays} plays within 5 % of the best requests per dollar"
    table.add_row("how good", f"{near}, mean {found.mean_found:.0%}")
    for number, one in enumerate(found.likely):
        name = render_settings(one.settings, found.defaults)
        table.add_row("" if number else "likely best", f"{one.share:.1%}  {name}")
    yield table
    yield Text(f"rehearsed {plays} times in virtual time; assumed: {'; '.join(found.assumptions)}", "dim")


def _usd(value: Interval) -> str:
    return f"${value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
