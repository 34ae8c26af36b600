"""Import of other tools' results, in their documented formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from powerband.bench import importers
from powerband.core.measurement import Measurement
from powerband.errors import InputError

COUNT = 200  # TTFT grows by 1 ms with every request


def vllm() -> dict[str, Any]:
    rows = range(COUNT)
    return {
        "start_times": [100 + 0.5 * row for row in rows],
        "ttfts": [0.1 + 0.001 * row for row in rows],
        "itls": [[0.02] * 9 for _ in rows],
        "input_lens": [50] * COUNT,
        "output_lens": [10] * COUNT,
        "errors": [""] * (COUNT - 1) + ["refused"],
    }


def guidellm() -> dict[str, Any]:
    rows = [
        {
            "request_start_time": 100 + 0.5 * row,
            "time_to_first_token_ms": 100 + row,
            "inter_token_latency_ms": 20.0,
            "request_latency": 0.28 + 0.001 * row,
            "prompt_tokens": 50,
            "output_tokens": 10,
        }
        for row in range(COUNT - 1)
    ]
    return {"benchmarks": [{"requests": {"successful": rows, "errored": [{}], "incomplete": []}}]}


def aiperf() -> str:
    lines = []
    for row in range(COUNT):
        metrics = {
            "input_sequence_length": {"value": 50, "unit": "tokens"},
            "time_to_first_token": {"value": 100.0 + row, "unit": "ms"},
            "inter_token_latency": {"value": 20.0, "unit": "ms"},
            "request_latency": {"value": 280.0 + row, "unit": "ms"},
            "output_sequence_length": {"value": 10, "unit": "tokens"},
        }
        failed = row == COUNT - 1
        metadata = {"request_start_ns": 1_000_000_000 * 100 + 500_000_000 * row}
        error = {"code": 499} if failed else None
        lines.append(json.dumps({"metadata": metadata, "metrics": {} if failed else metrics, "error": error}))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("tool", "text"),
    [("vllm bench serve", json.dumps(vllm())), ("guidellm", json.dumps(guidellm())), ("aiperf", aiperf())],
)
def test_all_tools_give_the_same_measurement(tool: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "result").write_text(text)
    found = importers.read(tmp_path / "result")
    (level,) = found.levels
    assert found.provenance["tool"] == tool
    assert (level.requests, level.failed) == (COUNT, 1)
    assert level.rate_per_s == pytest.approx(2.0, rel=0.01)
    assert level.latencies["ttft"].percentiles["p50"].value == pytest.approx(0.199, rel=0.02)
    assert level.latencies["tpot"].percentiles["p95"].value == pytest.approx(0.02)
    assert level.latencies["e2e"].percentiles["p50"].value == pytest.approx(0.379, rel=0.02)
    assert level.valid and tool in level.verdicts[0].sentence
    assert Measurement.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": [{}]}', json.dumps({"ttfts": [0.1]}), "not JSON"])
def test_a_file_without_per_request_results_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "result").write_text(text)
    with pytest.raises(InputError, match="contains no per-request results"):
        importers.read(tmp_path / "result")
