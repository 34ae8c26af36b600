"""Draw the README's picture from a proof's own result: nine variants of one model, how fast and how far off."""

from __future__ import annotations

import math
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "proofs" / "quality-variants.txt"
FLOOR = 0.05  # of `balanced`: mean divergence from the reference
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 70, 30, 64, 56
KL, SPEED = (0.002, 0.4), (40.0, 150.0)
_ROW = re.compile(r"^(\S+)\s+\d+\s+\d+ s\s+([\d.]+) \[([\d.]+), ([\d.]+)\].*\s(\d+)$")


def variants() -> list[tuple[str, float, float, float, float]]:
    """Return name, divergence with its interval, and tokens per second of each variant."""
    rows = (_ROW.match(line) for line in RESULT.read_text().splitlines())
    return [(row[1], float(row[2]), float(row[3]), float(row[4]), float(row[5])) for row in rows if row]


def _x(divergence: float) -> float:
    share = math.log(divergence / KL[0]) / math.log(KL[1] / KL[0])
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(speed: float) -> float:
    return HEIGHT - BOTTOM - (speed - SPEED[0]) / (SPEED[1] - SPEED[0]) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{said}</text>'


def drawn() -> str:
    """Return the picture."""
    fastest = sorted(variants(), key=lambda one: -one[4])[:4]
    spoiled = sum(one[1] > FLOOR for one in fastest)
    title = f"{spoiled} of the {len(fastest)} fastest variants are below the quality floor"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#1f2937">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff" stroke="#e5e7eb"/>',
        _text(LEFT, 30, title, 'font-size="18" font-weight="700"'),
        _text(
            LEFT, 50, "SmolLM2-135M on two cores, llama.cpp and vLLM; each measured as it is served", 'fill="#6b7280"'
        ),
        f'<rect x="{_x(FLOOR):.1f}" y="{TOP}" width="{WIDTH - RIGHT - _x(FLOOR):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}" fill="#fef2f2"/>',
        _text(_x(FLOOR) + 8, HEIGHT - BOTTOM - 12, "below the floor: refused, however fast", 'fill="#b91c1c"'),
    ]
    for speed in range(60, 141, 20):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(speed):.1f}" y2="{_y(speed):.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(_text(LEFT - 10, _y(speed) + 5, str(speed), 'text-anchor="end" fill="#6b7280"'))
    for divergence in (0.003, 0.01, 0.03, 0.1, 0.3):
        parts.append(
            _text(_x(divergence), HEIGHT - BOTTOM + 20, f"{divergence:g}", 'text-anchor="middle" fill="#6b7280"')
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        _text(middle, HEIGHT - 14, "divergence from the reference (KL)", 'text-anchor="middle" fill="#6b7280"')
    )
    parts.append(_text(LEFT - 52, TOP - 8, "tok/s", 'fill="#6b7280"'))
    for name, divergence, low, high, speed in variants():
        colour = "#b91c1c" if divergence > FLOOR else "#15803d"
        y = _y(speed)
        parts.append(
            f'<line x1="{_x(max(low, KL[0])):.1f}" x2="{_x(high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{_x(divergence):.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>')
        parts.append(_text(_x(divergence), y - 12, name, f'text-anchor="middle" fill="{colour}" font-weight="600"'))
    return "\n".join([*parts, "</svg>"]) + "\n"
