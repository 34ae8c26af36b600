"""Small charts as SVG text, without scripts: axes, lines, bands, points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 30, 42
Point = tuple[float, float]


@dataclass
class Chart:
    """One plot; all coordinates are in data units."""

    title: str
    x_label: str
    y_label: str
    x: tuple[float, float]
    y: tuple[float, float]
    width: int = 520
    height: int = 300
    log_x: bool = False
    log_y: bool = False
    x_text: Callable[[float], str] = lambda value: f"{value:g}"
    y_text: Callable[[float], str] = lambda value: f"{value:g}"
    x_names: Sequence[str] = ()  # labels of x = 0, 1, 2, ... instead of numeric ticks
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def line(self, points: Sequence[Point], css: str, *, label: str | None = None) -> None:
        """Draw a line through points."""
        if label:
            self.legend.append((label, css))
        if points:
            path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
            self.marks.append(f'<polyline class="line {css}" points="{path}"/>')

    def dots(self, points: Sequence[tuple[float, float, float, float, str]], css: str) -> None:
        """Draw points with intervals, given as (x, y, low, high, tooltip)."""
        for x, y, low, high, tooltip in points:
            at, top, bottom = self._x(x), self._y(high), self._y(low)
            self.marks.append(
                f'<g class="{css}"><title>{escape(tooltip)}</title>'
                f'<line class="whisker" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
                f'<circle class="dot" cx="{at:.1f}" cy="{self._y(y):.1f}" r="4"/></g>'
            )

    def horizontal_limit(self, y: float, text: str) -> None:
        """Draw a labelled horizontal line."""
        if self.y[0] <= y <= self.y[1]:
            at = self._y(y)
            self.marks.append(
                f'<line class="limit" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text class="limit-text" x="{_LEFT + 4}" y="{at - 5:.1f}">{escape(text)}</text>'
            )

    def vertical_limit(self, x: float, text: str) -> None:
        """Draw a labelled vertical line."""
        if self.x[0] <= x <= self.x[1]:
            at = self._x(x)
            side = "end" if at > self.width * 0.75 else "start"
            self.marks.append(
                f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self.height - _BOTTOM}"/>'
                f'<text class="limit-text" x="{at + (-5 if side == "end" else 5):.1f}" y="{_TOP + 12}" '
                f'text-anchor="{side}">{escape(text)}</text>'
            )

    def shade(self, begin: float, end: float) -> None:
        """Shade a span of the x axis."""
        left, right = self._x(max(begin, self.x[0])), self._x(min(end, self.x[1]))
        self.marks.insert(
            0,
            f'<rect class="shade" x="{left:.1f}" y="{_TOP}" width="{max(0, right - left):.1f}" '
            f'height="{self.height - _TOP - _BOTTOM}"/>',
        )

    def render(self) -> str:
        """Return the SVG."""
        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">',
            f'<text class="title" x="{_LEFT}" y="16">{escape(self.title)}</text>',
        ]
        for value in ticks(*self.y, log=self.log_y):
            at = self._y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{self.y_text(value)}</text>'
            )
        named = [(float(number), escape(name)) for number, name in enumerate(self.x_names)]
        for value, text in named or [(one, self.x_text(one)) for one in ticks(*self.x, log=self.log_x)]:
            at = self._x(value)
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{self.height - _BOTTOM + 16}" text-anchor="middle">{text}</text>'
            )
        bottom = self.height - _BOTTOM
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        parts += self.marks
        middle = (_LEFT + self.width - _RIGHT) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 6}" text-anchor="middle">{self.x_label}</text>'
        )
        parts.append(
            f'<text class="label" transform="rotate(-90)" x="{-(_TOP + bottom) / 2}" y="13" text-anchor="middle">'
            f"{self.y_label}</text>"
        )
        at = self.width - _RIGHT
        for label, css in reversed(self.legend):
            at -= 7 * len(label) + 26
            parts.append(
                f'<line class="line {css}" x1="{at}" x2="{at + 16}" y1="12" y2="12"/>'
                f'<text class="tick" x="{at + 20}" y="16">{escape(label)}</text>'
            )
        return "".join([*parts, "</svg>"])

    def _x(self, value: float) -> float:
        return _LEFT + _fraction(value, self.x, self.log_x) * (self.width - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return self.height - _BOTTOM - _fraction(value, self.y, self.log_y) * (self.height - _TOP - _BOTTOM)


def _fraction(value: float, span: tuple[float, float], log: bool) -> float:
    low, high = span
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    """Return round tick values within a range."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        inside = [value for value in found if low * 0.999 <= value <= high * 1.001]
        return inside if len(inside) <= 7 else [value for value in inside if f"{value:e}"[0] == "1"]
    if high <= low:
        return [low]
    rough = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
