"""Drift detection, SLO checks and capture of a fleet's traffic."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from powerband import observe
from powerband.core.prefix_hash import FINE_BLOCK_CHARS, block_hashes, message_text
from powerband.core.recipe import Promised, Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import prompts, tokens
from powerband.observe.capture import capture
from powerband.observe.drift import DriftDetector
from powerband.observe.retune import requests_since_drift
from powerband.serve import ModelSpec
from powerband.serve.router.capture import next_id
from powerband.serve.router.redaction import redacted
from powerband.store import documents

CHAT = cast(Workload, documents.find("workload", "chat"))
AGENT = cast(Workload, documents.find("workload", "agent"))


def records_of(workload: Workload, count: int, *, longer: float = 1.0) -> list[dict[str, Any]]:
    """Return the records that a fleet would capture of a workload."""
    traffic = prompts.prepare(workload.at_rate(4.0), count, vocabulary=tokens.vocabulary(""))
    found: list[dict[str, Any]] = []
    ids: dict[int, int] = {}
    for number, at_s in enumerate(traffic.due_s):
        chat: list[dict[str, str]] = []
        for turn in range(traffic.turns):
            chat = traffic.messages(number, turn=turn, earlier=chat)
            text = "".join(message_text(one["role"], one["content"]) for one in chat)
            wrote = round(longer * traffic.output_tokens[number * traffic.turns + turn])
            found.append(
                {
                    "timestamp": round(1000 * (at_s + 7.3 * turn)),
                    "input_length": 20 + len(text) // 5,  # the chat template adds some
                    "output_length": wrote,
                    "hash_ids": [ids.setdefault(one, len(ids)) for one in block_hashes(text, FINE_BLOCK_CHARS)],
                    "characters": len(text),
                    "turns": turn + 1,
                    "model": "m",
                    "recipe": "r",
                    "ttft_s": 0.1,
                    "tpot_s": 0.02,
                    "e2e_s": 0.1 + 0.02 * wrote,
                }
            )
            chat.append({"role": "assistant", "content": "word " * wrote})
    return sorted(found, key=lambda row: row["timestamp"])


def model_spec(name: str = "m", recipe: str = "r") -> ModelSpec:
    return ModelSpec(name=name, data={}, recipe=recipe, replicas=1, in_flight=4, queue_timeout_s=1.0)


def recipe(slo: dict[str, Any], **promised: Any) -> Recipe:
    """Return a recipe that was measured with the catalogue's chat workload."""
    whole = Interval(1.0, 0.98, 1.0)
    promise = Promised(slo=SLO.model_validate(slo), rate_per_s=4.0, attainment=whole, **promised)
    return Recipe(
        summary="",
        model="",
        model_digest="",
        scheme="bf16",
        weights_digest="",
        engine_version="1",
        deployment={},
        settings={},
        promise=promise,
        workload=CHAT,
        validity={},
        usd_per_h=1.0,
        usd_per_1m_tokens=1.0,
        command="",
    )


@pytest.mark.parametrize("workload", [CHAT, AGENT], ids=["one turn", "several turns"])
def test_traffic_like_the_reference_is_in_region(workload: Workload) -> None:
    detector = DriftDetector(observe.reference_traffic(workload, 4.0, source="", count=1000))
    other = workload.with_seed(7)
    whole = observe.features(records_of(other, 800))
    last_s = max(row.at_s for row in whole if row.turns == 1)
    assert [one for row in whole if row.at_s <= last_s for one in detector.update(row)] == []


def test_longer_answers_raise_an_alarm_on_the_output_axis() -> None:
    detector = DriftDetector(observe.reference_traffic(CHAT, 4.0, source="", count=1000))
    alarms = [
        one for row in observe.features(records_of(CHAT.with_seed(7), 500, longer=1.6)) for one in detector.update(row)
    ]
    assert {(one.axis, one.side) for one in alarms} == {("output", "higher")}


def test_broken_figures_are_reported_with_their_values() -> None:
    records = records_of(CHAT.with_seed(7), 300)
    for row in records[:60]:  # 20% of the 300 requests are late
        row["ttft_s"] = 0.9
    gauges = [{"prefix_hits_tokens": 2e3, "prefix_queries_tokens": 1e4}] * 2
    kept = observe.observe(recipe({"ttft": {"p50": 0.5}, "tpot": {"p95": 0.05}}, prefix_hit_share=0.2), records, gauges)
    assert kept.verdict == "in region" and not kept.problems()
    late = observe.observe(recipe({"ttft": {"p95": 0.5}, "tpot": {"p95": 0.01}}), records)
    assert late.verdict == "broken"
    assert [one.split()[0] for one in late.broken] == ["TTFT", "TPOT"] and "80.0%" in late.broken[0]
    less = observe.observe(recipe({"ttft": {"p50": 0.5}}, prefix_hit_share=0.6), records, gauges)
    assert less.broken == ("prefix-cache hit rate is 20% (recipe: 60%, limit: 48%)",)


def test_only_requests_since_the_drift_are_tuned_for() -> None:
    before, after = records_of(CHAT.with_seed(7), 300), records_of(CHAT.with_seed(8), 300, longer=1.6)
    for row in after:
        row["timestamp"] += before[-1]["timestamp"]
        row["hash_ids"] = [1_000_000 + one for one in row["hash_ids"]]
    found = observe.observe(recipe({"ttft": {"p50": 0.5}}), [*before, *after])
    assert found.verdict == "drifted" and "output length is higher since" in found.problems()[0]
    since = requests_since_drift(found)
    assert 280 < len(since) < 320 and since[-1] == after[-1]
    assert requests_since_drift(observe.observe(recipe({"ttft": {"p50": 0.01}}), before[:50])) == []  # too few


def test_captured_traffic_is_a_workload(tmp_path: Path) -> None:
    records = records_of(CHAT.with_seed(7), 50)
    path = capture(records, tmp_path, name="mine")
    workload = documents.read_as(Workload, path)
    traffic = prompts.prepare(workload, 50, vocabulary=tokens.vocabulary(""), base=tmp_path)
    assert list(traffic.output_tokens) == [row["output_length"] for row in records]
    assert list(traffic.prompt_tokens) == pytest.approx([row["characters"] / 5 for row in records], abs=2)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.yaml", "mine-trace.jsonl"}
    lines = (tmp_path / "mine-trace.jsonl").read_text().splitlines()
    kept = {key for line in lines for key in json.loads(line)}
    assert kept == {"timestamp", "input_length", "output_length", "hash_ids", "characters", "turns"}


def test_traffic_that_was_tuned_for_is_in_region(tmp_path: Path) -> None:
    """In any language: a captured workload is compared by its records, not by prompts generated from it."""
    before, after = records_of(AGENT.with_seed(7), 60), records_of(AGENT.with_seed(8), 100)
    for row in (*before, *after):
        row["characters"] *= 3
    workload = documents.read_as(Workload, capture(before, tmp_path, name="mine"))
    assert workload.trace
    trace = workload.trace.model_copy(update={"path": str(tmp_path / workload.trace.path)})  # as a recipe pins it
    detector = DriftDetector(observe.reference_traffic(workload.model_copy(update={"trace": trace}), 1.0, source=""))
    whole = observe.features(after)
    last_s = max(row.at_s for row in whole if row.turns == 1)
    assert [one for row in whole if row.at_s <= last_s for one in detector.update(row)] == []


def test_a_sample_of_prompts_where_text_was_captured(tmp_path: Path) -> None:
    text = (
        "Ann (ann.lee+x@mail.example.org, +49 170 1234567) pays with 4111 1111 1111 1111 from 10.0.0.7, "
        "sk-proj-9aXb8Yc7Zd6We5Vf4Ug, see https://a.example/b?c=1 for 12 of 345 items"
    )
    redacted_text = redacted(text)
    assert redacted_text == "Ann ([email], [number]) pays with [number] from [ip], [key], see [url] for 12 of 345 items"
    records = records_of(CHAT.with_seed(7), 50)
    for row in records:
        row["messages"] = [{"role": "user", "content": redacted_text}]
    capture(records, tmp_path, name="mine")
    sample = Workload.model_validate(
        {
            "arrivals": {"process": "poisson", "rate_per_s": 1},
            "output": {"shape": "fixed", "tokens": 4},
            "dataset": {"path": "mine-prompts.jsonl", "repeat": True},
        }
    )
    assert redacted_text in prompts.prepare(sample, 50, vocabulary=tokens.vocabulary(""), base=tmp_path).texts()[0]


def test_a_fleet_without_captured_traffic(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no captured traffic"):
        observe.read_records(tmp_path, model_spec())
    (tmp_path / "traffic.jsonl").write_text(
        json.dumps(records_of(CHAT, 1)[0]) + "\n" + '{"timestamp": 1'
    )  # a truncated line
    assert (
        observe.read_records(tmp_path, model_spec(name="other"))
        == observe.read_records(tmp_path, model_spec(recipe="newer"))
        == []
    )
    assert len(observe.read_records(tmp_path, model_spec())) == 1
    with pytest.raises(InputError, match="captured yet"):
        capture([], tmp_path, name="mine")


def test_a_new_picker_continues_the_block_numbers(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"hash_ids": [3, 8]}) + "\n" + json.dumps({"hash_ids": []}) + "\n")
    assert next_id(path) == 9
