"""Traffic against what a recipe was proven with: seen as a fleet sees it, named when it changes, kept wordless."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from powerband import observe
from powerband.core.prefix_hash import FINE, block_hashes, said
from powerband.core.recipe import Promised, Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import prompts, tokens
from powerband.observe.capture import capture
from powerband.observe.drift import Drift
from powerband.observe.retune import enough
from powerband.serve import ModelSpec
from powerband.serve.router.redaction import redacted
from powerband.serve.router.telemetry import next_id
from powerband.store import documents

CHAT = cast(Workload, documents.find("workload", "chat"))
AGENT = cast(Workload, documents.find("workload", "agent"))


def noted(workload: Workload, count: int, *, longer: float = 1.0) -> list[dict[str, Any]]:
    """Return what a fleet would note of such traffic."""
    traffic = prompts.prepare(workload.at_rate(4.0), count, vocabulary=tokens.vocabulary(""))
    found: list[dict[str, Any]] = []
    ids: dict[int, int] = {}
    for number, at_s in enumerate(traffic.due_s):
        chat: list[dict[str, str]] = []
        for turn in range(traffic.turns):
            chat = traffic.messages(number, turn=turn, earlier=chat)
            text = "".join(said(one["role"], one["content"]) for one in chat)
            wrote = round(longer * traffic.output_tokens[number * traffic.turns + turn])
            found.append(
                {
                    "timestamp": round(1000 * (at_s + 7.3 * turn)),
                    "input_length": 20 + len(text) // 5,  # the template adds some
                    "output_length": wrote,
                    "hash_ids": [ids.setdefault(one, len(ids)) for one in block_hashes(text, FINE)],
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


def part(name: str = "m", recipe: str = "r") -> ModelSpec:
    return ModelSpec(name=name, data={}, recipe=recipe, replicas=1, in_flight=4, queue_timeout_s=1.0)


def recipe(slo: dict[str, Any], **promised: Any) -> Recipe:
    """Return a recipe that was proven with the catalogue's chat."""
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
def test_traffic_like_the_proven_one_is_in_region(workload: Workload) -> None:
    drift = Drift(observe.proven(workload, 4.0, source="", count=1000))
    other = workload.with_seed(7)
    whole = observe.rows(noted(other, 800))
    last_s = max(row.at_s for row in whole if row.turns == 1)
    assert [one for row in whole if row.at_s <= last_s for one in drift.see(row)] == []


def test_longer_answers_are_named() -> None:
    drift = Drift(observe.proven(CHAT, 4.0, source="", count=1000))
    alarms = [one for row in observe.rows(noted(CHAT.with_seed(7), 500, longer=1.6)) for one in drift.see(row)]
    assert {(one.axis, one.side) for one in alarms} == {("output", "higher")}


def test_what_breaks_is_named_with_its_figures() -> None:
    held = noted(CHAT.with_seed(7), 300)
    for row in held[:60]:  # so much is late, and the rest of 300 in time
        row["ttft_s"] = 0.9
    gauges = [{"prefix_hits_tokens": 2e3, "prefix_queries_tokens": 1e4}] * 2
    kept = observe.observe(recipe({"ttft": {"p50": 0.5}, "tpot": {"p95": 0.05}}, prefix_hit_share=0.2), held, gauges)
    assert kept.found == "in region" and not kept.said()
    late = observe.observe(recipe({"ttft": {"p95": 0.5}, "tpot": {"p95": 0.01}}), held)
    assert late.found == "broken"
    assert [one.split()[0] for one in late.broken] == ["TTFT", "TPOT"] and "80.0%" in late.broken[0]
    less = observe.observe(recipe({"ttft": {"p50": 0.5}}, prefix_hit_share=0.6), held, gauges)
    assert less.broken == ("prefix hits tokens are 20% of prefix queries tokens, 60% when proven",)


def test_what_is_tuned_for_came_after_the_change() -> None:
    before, after = noted(CHAT.with_seed(7), 300), noted(CHAT.with_seed(8), 300, longer=1.6)
    for row in after:
        row["timestamp"] += before[-1]["timestamp"]
        row["hash_ids"] = [1_000_000 + one for one in row["hash_ids"]]
    found = observe.observe(recipe({"ttft": {"p50": 0.5}}), [*before, *after])
    assert found.found == "drifted" and "output is higher since" in found.said()[0]
    since = enough(found)
    assert 280 < len(since) < 320 and since[-1] == after[-1]
    assert enough(observe.observe(recipe({"ttft": {"p50": 0.01}}), before[:50])) == []  # late, but too few


def test_captured_traffic_is_a_workload(tmp_path: Path) -> None:
    held = noted(CHAT.with_seed(7), 50)
    path = capture(held, tmp_path, name="mine")
    workload = documents.of(Workload, path)
    traffic = prompts.prepare(workload, 50, vocabulary=tokens.vocabulary(""), base=tmp_path)
    assert list(traffic.output_tokens) == [row["output_length"] for row in held]
    assert list(traffic.prompt_tokens) == pytest.approx([row["characters"] / 5 for row in held], abs=2)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.yaml", "mine-trace.jsonl"}
    lines = (tmp_path / "mine-trace.jsonl").read_text().splitlines()
    kept = {key for line in lines for key in json.loads(line)}
    assert kept == {"timestamp", "input_length", "output_length", "hash_ids", "characters", "turns"}


def test_traffic_that_was_tuned_for_is_in_region(tmp_path: Path) -> None:
    """In whatever language it was: captured traffic is compared as it was seen, not as it is made anew."""
    before, after = noted(AGENT.with_seed(7), 60), noted(AGENT.with_seed(8), 100)
    for row in (*before, *after):
        row["characters"] *= 3
    workload = documents.of(Workload, capture(before, tmp_path, name="mine"))
    assert workload.trace
    trace = workload.trace.model_copy(update={"path": str(tmp_path / workload.trace.path)})  # as a recipe pins it
    drift = Drift(observe.proven(workload.model_copy(update={"trace": trace}), 1.0, source=""))
    whole = observe.rows(after)
    last_s = max(row.at_s for row in whole if row.turns == 1)
    assert [one for row in whole if row.at_s <= last_s for one in drift.see(row)] == []


def test_a_sample_of_prompts_where_text_was_noted(tmp_path: Path) -> None:
    text = (
        "Ann (ann.lee+x@mail.example.org, +49 170 1234567) pays with 4111 1111 1111 1111 from 10.0.0.7, "
        "sk-proj-9aXb8Yc7Zd6We5Vf4Ug, see https://a.example/b?c=1 for 12 of 345 items"
    )
    told = redacted(text)
    assert told == "Ann ([email], [number]) pays with [number] from [ip], [key], see [url] for 12 of 345 items"
    held = noted(CHAT.with_seed(7), 50)
    for row in held:
        row["messages"] = [{"role": "user", "content": told}]
    capture(held, tmp_path, name="mine")
    sample = Workload.model_validate(
        {
            "arrivals": {"process": "poisson", "rate_per_s": 1},
            "output": {"shape": "fixed", "tokens": 4},
            "dataset": {"path": "mine-prompts.jsonl", "repeat": True},
        }
    )
    assert told in prompts.prepare(sample, 50, vocabulary=tokens.vocabulary(""), base=tmp_path).texts()[0]


def test_a_fleet_without_notes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no notes"):
        observe.notes(tmp_path, part())
    (tmp_path / "traffic.jsonl").write_text(json.dumps(noted(CHAT, 1)[0]) + "\n" + '{"timestamp": 1')  # cut off
    assert observe.notes(tmp_path, part(name="other")) == observe.notes(tmp_path, part(recipe="newer")) == []
    assert len(observe.notes(tmp_path, part())) == 1
    with pytest.raises(InputError, match="nothing yet"):
        capture([], tmp_path, name="mine")


def test_a_new_picker_numbers_blocks_anew(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"hash_ids": [3, 8]}) + "\n" + json.dumps({"hash_ids": []}) + "\n")
    assert next_id(path) == 9
