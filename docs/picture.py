"""Draw the pictures of the README and the docs as SVG: variants (from a proof's result), the loop, the processes."""

from __future__ import annotations

import math
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "proofs" / "quality-variants.txt"
FLOOR = 0.05  # kl_mean of the floor `balanced`
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


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def variants_chart() -> str:
    """Return throughput against divergence for each variant of the proof quality-variants."""
    fastest = sorted(variants(), key=lambda one: -one[4])[:4]
    rejected = sum(one[1] > FLOOR for one in fastest)
    title = f"{rejected} of the {len(fastest)} fastest variants are below the quality floor"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#1f2937">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff" stroke="#e5e7eb"/>',
        _text(LEFT, 30, title, 'font-size="18" font-weight="700"'),
        _text(
            LEFT,
            50,
            "SmolLM2-135M on two CPU cores with llama.cpp and vLLM; quality of the served deployment, 95 % intervals",
            'fill="#6b7280"',
        ),
        f'<rect x="{_x(FLOOR):.1f}" y="{TOP}" width="{WIDTH - RIGHT - _x(FLOOR):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}" fill="#fef2f2"/>',
        _text(_x(FLOOR) + 8, HEIGHT - BOTTOM - 12, "below the floor: rejected at any speed", 'fill="#b91c1c"'),
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
        _text(
            middle,
            HEIGHT - 14,
            "mean KL divergence from the reference, nats (lower is better)",
            'text-anchor="middle" fill="#6b7280"',
        )
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


def _head(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff" stroke="#e5e7eb"/>',
    ]


def _box(
    x: int, y: int, width: int, height: int, title: str, lines: tuple[str, ...] = (), fill: str = "#f3f4f6"
) -> str:
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="#d1d5db"/>']
    parts.append(_text(x + width / 2, y + 20, title, 'text-anchor="middle" font-weight="700"'))
    for number, line in enumerate(lines):
        more = 'text-anchor="middle" fill="#4b5563" font-size="11.5"'
        parts.append(_text(x + width / 2, y + 38 + 16 * number, line, more))
    return "\n".join(parts)


def _arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", *, dashed: bool = False) -> str:
    style = ' stroke-dasharray="4 3"' if dashed else ""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#6b7280" stroke-width="1.5"{style} '
    parts = [line + 'marker-end="url(#arrow)"/>']
    if label:
        more = 'text-anchor="middle" fill="#6b7280" font-size="11.5"'
        parts.append(_text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, more))
    return "\n".join(parts)


def loop() -> str:
    """Return the loop of the commands: from inputs to a recipe, to a fleet, and back when the traffic drifts."""
    parts = _head(860, 300)
    parts.append(
        _box(
            20,
            30,
            160,
            124,
            "You give",
            ("model", "workload (traffic)", "latency SLO", "quality floor", "devices, prices"),
            "#eff6ff",
        )
    )
    steps = (
        ("plan", ("predict, no GPU",)),
        ("quantize", ("build variants",)),
        ("tune", ("trials, quality gate,", "validation")),
        ("recipe.yaml", ("promise, validity", "region, evidence")),
    )
    for number, (title, lines) in enumerate(steps):
        x = 215 + 160 * number
        parts.append(_box(x, 50, 130, 84, title, lines, "#ecfdf5" if title == "recipe.yaml" else "#f3f4f6"))
        parts.append(_arrow(x - (35 if number == 0 else 30), 92, x - 2, 92))
    parts.append(_box(695, 190, 130, 84, "serve", ("fleet behind one", "OpenAI address")))
    parts.append(_arrow(760, 136, 760, 188))
    parts.append(_box(535, 190, 130, 84, "observe", ("drift, late answers", "capture traffic")))
    parts.append(_arrow(693, 232, 667, 232))
    parts.append(_arrow(600, 188, 600, 136))
    parts.append(_text(608, 166, "new workload", 'fill="#6b7280" font-size="11.5"'))
    parts.append(_box(375, 190, 130, 84, "verify", ("recipe.yaml still holds", "after an upgrade?")))
    parts.append(_text(20, 236, "bench, evaluate, run, diff:", 'fill="#4b5563"'))
    parts.append(_text(20, 254, "each step as a command", 'fill="#4b5563"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def processes() -> str:
    """Return the processes of a fleet and what each talks to."""
    parts = _head(860, 330)
    parts.append(_box(20, 60, 110, 60, "client", ("OpenAI API",), "#eff6ff"))
    parts.append(_box(190, 50, 130, 80, "Envoy", ("HTTP, retries,", "moves the bytes")))
    parts.append(_box(190, 200, 130, 100, "picker", ("serve/router", "authenticate, admit,", "queue, choose replica")))
    parts.append(_box(400, 50, 110, 80, "relay", ("serve/relay", "error event if", "the engine dies")))
    parts.append(_box(570, 50, 110, 80, "keeper", ("runtime/keeper", "kills the engine", "if we die")))
    parts.append(_box(730, 50, 110, 80, "engine", ("vLLM or", "llama-server"), "#ecfdf5"))
    parts.append(
        _box(480, 200, 200, 100, "supervisor", ("serve/control", "starts, restarts, scales,", "rolls out; status.json"))
    )
    parts.append(_arrow(130, 90, 188, 90))
    parts.append(_arrow(320, 90, 398, 90, "HTTP"))
    parts.append(_arrow(255, 130, 255, 198))
    parts.append(_text(262, 168, "ext_proc, access log (gRPC)", 'fill="#6b7280" font-size="11.5"'))
    parts.append(
        '<path d="M455 50 C455 20 785 20 785 48" fill="none" stroke="#6b7280" stroke-width="1.5" '
        'marker-end="url(#arrow)"/>'
    )
    parts.append(_text(620, 24, "HTTP on loopback", 'text-anchor="middle" fill="#6b7280" font-size="11.5"'))
    parts.append(_arrow(680, 90, 728, 90, "owns"))
    parts.append(_arrow(478, 250, 322, 250, "endpoints (control.sock)"))
    parts.append(_arrow(600, 198, 625, 132, dashed=True))
    parts.append(_arrow(520, 198, 470, 132, dashed=True))
    parts.append(_text(558, 176, "starts", 'text-anchor="middle" fill="#6b7280" font-size="11.5"'))
    parts.append(_box(730, 200, 110, 100, "operator", ("top, rollout,", "observe,", "Prometheus"), "#eff6ff"))
    parts.append(_arrow(728, 250, 682, 250))
    return "\n".join([*parts, "</svg>"]) + "\n"


def badge(label: str, value: str, colour: str) -> str:
    """Return a small badge."""
    left, right = 12 + 7 * len(label), 12 + 7 * len(value)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#ffffff">'
        f'<rect width="{left + right}" height="20" rx="4" fill="#4b5563"/>'
        f'<rect x="{left}" width="{right}" height="20" rx="4" fill="{colour}"/>'
        f'<text x="{left / 2}" y="14" text-anchor="middle">{label}</text>'
        f'<text x="{left + right / 2}" y="14" text-anchor="middle">{value}</text></svg>\n'
    )
