"""A study of the golden server that takes about a minute and a half."""

import sys
from pathlib import Path

_WORKLOAD = """
powerband: workload/1
name: quick
arrivals: {process: poisson, rate_per_s: 10}
prompt: {shape: fixed, tokens: 8}
output: {shape: fixed, tokens: 4}
"""


def argv(folder: Path, name: str, *more: str, trials: int = 4, budget: str = "100s") -> list[str]:
    """Return the command that tunes into `folder/name`: 30 configurations, half of which crash."""
    (folder / "w.yaml").write_text(_WORKLOAD)
    (folder / "s.yaml").write_text("powerband: slo/1\nttft: {p90: 300ms}\n")
    return [
        sys.executable, "-m", "powerband", "tune", "golden", "--engine", "fake", "--quality", "none",
        "--workload", str(folder / "w.yaml"), "--slo", str(folder / "s.yaml"), "--requests", "50",
        "--trials", str(trials), "--budget", budget, "--output", str(folder / name), *more,
    ]  # fmt: skip
