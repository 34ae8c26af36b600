"""Traffic against what a recipe was proven with: seen as a fleet sees it, named when it changes, kept wordless."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from powerband import observe
from powerband.core.beginnings import FINE, chain, said
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.load import prompts, tokens
from powerband.observe.drift import Drift
from powerband.serve.watch import next_id
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
                    "hash_ids": [ids.setdefault(one, len(ids)) for one in chain(text, FINE)],
                    "characters": len(text),
                    "turns": turn + 1,
                    "model": "m",
                    "ttft_s": 0.1,
                }
            )
            chat.append({"role": "assistant", "content": "word " * wrote})
    return sorted(found, key=lambda row: row["timestamp"])


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


def test_captured_traffic_is_a_workload(tmp_path: Path) -> None:
    held = noted(CHAT.with_seed(7), 50)
    path = observe.captured(held, tmp_path, name="mine")
    workload = documents.of(Workload, path)
    traffic = prompts.prepare(workload, 50, vocabulary=tokens.vocabulary(""), base=tmp_path)
    assert list(traffic.output_tokens) == [row["output_length"] for row in held]
    assert list(traffic.prompt_tokens) == pytest.approx([row["characters"] / 5 for row in held], abs=2)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.yaml", "mine-trace.jsonl"}
    lines = (tmp_path / "mine-trace.jsonl").read_text().splitlines()
    kept = {key for line in lines for key in json.loads(line)}
    assert kept == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_a_fleet_without_notes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no notes"):
        observe.notes(tmp_path, "m")
    (tmp_path / "traffic.jsonl").write_text(json.dumps(noted(CHAT, 1)[0]) + "\n" + '{"timestamp": 1')  # cut off
    assert observe.notes(tmp_path, "other") == []
    assert len(observe.notes(tmp_path, "m")) == 1
    with pytest.raises(InputError, match="nothing yet"):
        observe.captured([], tmp_path, name="mine")


def test_a_new_picker_numbers_blocks_anew(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"hash_ids": [3, 8]}) + "\n" + json.dumps({"hash_ids": []}) + "\n")
    assert next_id(path) == 9
