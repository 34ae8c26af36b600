"""`powerband top`: a fleet's status in a terminal of 80 columns."""

import io
from typing import Any

from rich.console import Console

from powerband.cli.top import table

ABOUT: dict[str, Any] = {"ttft_s": 0.2, "usd_per_h": 0.1, "weights_bytes": 145 * 2**20, "kv_bytes": 2**30}
REPLICA: dict[str, Any] = {
    "name": "smollm2-1",
    "model": "smollm2",
    "recipe": "chat",
    "state": "ready",
    "pid": None,
    "starts": 1,
    "start_s": 41.26,
    "problem": "",
    "gauges": {"kv_use": 0.25, "prefix_hits_tokens": 30.0, "prefix_queries_tokens": 40.0},
    "about": ABOUT,
}
STATUS: dict[str, Any] = {
    "done": 4,
    "refused": {"busy": 2},
    "overflows": 1,
    "recipes": {"chat": {"ttft_s": [0.1, 0.1, 0.1, 0.3]}},
    "pools": {"smollm2": {"depth": 3, "running": {"smollm2-1": 2}}},
    "tenants": {"anyone": {"usd": 0.0125}},
    "replicas": [REPLICA, REPLICA | {"name": "smollm2-2", "state": "starting", "start_s": None, "gauges": {}}],
}


def shown(status: dict[str, Any]) -> str:
    written = io.StringIO()
    Console(file=written, width=80).print(table(status))
    return written.getvalue()


def test_a_fleet_fits_a_terminal() -> None:
    text = shown(STATUS)
    assert "…" not in text
    assert "4 answered, 3 waiting, 2 rejected, 1 sent to fallback" in text
    assert "TTFT p50 100 ms, 75.0% within the SLO, $0.20/h, $0.0125 billed to tenants" in " ".join(text.split())
    assert "41.3 s" in text and "145.0 MiB" in text and "75%" in text and "starting" in text


def test_gpus_of_a_replica_are_shown_below_its_name() -> None:
    text = shown(STATUS | {"replicas": [REPLICA | {"gpus": [4, 5]}, REPLICA]})
    assert text.count("GPU 4,5") == 1 and "…" not in text


def test_unknown_figures_are_not_shown() -> None:
    text = shown({"replicas": [REPLICA | {"about": ABOUT | {"ttft_s": None, "usd_per_h": 0.0}}]})
    assert "first token" not in text and "an hour" not in text


def test_what_the_autoscaler_wants_is_shown_with_its_reason() -> None:
    reason = "8: follows the peak of the last 60 s, at 71% of the cost of the best fixed size, 12; 2 more in 57 s"
    text = " ".join(shown(STATUS | {"scaling": {"smollm2": {"reason": reason}}}).split())
    assert f"smollm2 scales to {reason}" in text
