"""Reproducible traffic: the same seed gives the same requests; another seed shares only the workload's prefixes."""

import itertools
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerband import catalog
from powerband.core.workload import Workload
from powerband.errors import DocumentError, InputError
from powerband.load import arrivals, prompts, tokens
from powerband.load.prompts import Traffic
from powerband.store import documents

WORDS = tokens.vocabulary(None)


def workload(**changes: object) -> Workload:
    plain = {
        "arrivals": {"process": "poisson", "rate_per_s": 10},
        "prompt": {"shape": "uniform", "low": 20, "high": 60},
        "output": {"shape": "fixed", "tokens": 8},
        "prefix": {"tokens": 30, "distinct": 3, "share": 0.5},
    }
    return Workload.model_validate({key: value for key, value in (plain | changes).items() if value is not None})


def texts(traffic: Traffic) -> list[str]:
    return [json.dumps(traffic.messages(number)) for number in range(len(traffic))]


def test_a_later_turn_has_the_earlier_turns_in_its_prompt() -> None:
    lengths = {"prompt": {"shape": "fixed", "tokens": 100}, "output": {"shape": "fixed", "tokens": 50}}
    session = workload(**lengths, prefix={"tokens": 30, "distinct": 1, "share": 1.0}, turns={"count": 3})
    traffic = prompts.prepare(session, 2, vocabulary=WORDS)
    assert list(traffic.requests()) == [(n, prompt, 50) for n in (0, 1) for prompt in (130, 280, 430)]


def test_the_same_seed_gives_the_same_traffic() -> None:
    one, other = (prompts.prepare(workload(seed=5), 200, vocabulary=WORDS) for _ in range(2))
    assert texts(one) == texts(other)
    assert one.due_s == other.due_s and one.output_tokens == other.output_tokens


@settings(deadline=None, max_examples=12)  # of 8 seeds: 336 pairs
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8, unique=True))
def test_another_seed_shares_no_prompt(seeds: list[int]) -> None:
    own = []
    for seed in seeds:
        traffic = prompts.prepare(workload(seed=seed), 50, vocabulary=WORDS)
        starts = {" ".join(traffic.messages(number)[-1]["content"].split()[:8]) for number in range(50)}
        assert len(starts) == 50
        own.append(starts)
    assert not any(one & other for one, other in itertools.combinations(own, 2))


def test_shared_prefixes_do_not_depend_on_the_seed() -> None:
    found = []
    for seed in (1, 2):
        traffic = prompts.prepare(workload(seed=seed), 200, vocabulary=WORDS)
        found.append({m[0]["content"] for n in range(200) if len(m := traffic.messages(n)) == 2})
    assert found[0] == found[1] and len(found[0]) == 3


def test_lengths_are_exact_in_words() -> None:
    traffic = prompts.prepare(workload(prefix={"tokens": 30}), 50, vocabulary=WORDS)
    for number in range(50):
        words = sum(len(message["content"].split()) for message in traffic.messages(number))
        assert words == traffic.prompt_tokens[number]


@pytest.mark.parametrize(
    ("process", "variation"),
    [
        ({"process": "poisson", "rate_per_s": 10}, 1.0),
        ({"process": "gamma", "rate_per_s": 10, "variation": 3}, 3.0),
        ({"process": "constant", "rate_per_s": 10}, 0.0),
    ],
)
def test_arrivals_have_their_rate_and_their_burstiness(process: dict[str, object], variation: float) -> None:
    times = arrivals.times_s(workload(arrivals=process), 20_000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1, abs=0.01)


def test_bursts_arrive_together() -> None:
    times = arrivals.times_s(workload(arrivals={"process": "bursts", "rate_per_s": 10, "size": 5}), 20)
    assert list(times) == [0.0] * 5 + [0.5] * 5 + [1.0] * 5 + [1.5] * 5


def test_the_rate_of_sessions_is_the_request_rate_divided_by_turns() -> None:
    times = arrivals.times_s(workload(turns={"count": 5}), 4000)
    assert times[-1] == pytest.approx(2000, rel=0.06)


def test_hash_ids_of_a_mooncake_trace_become_shared_text(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 1000, "output_length": 6, "hash_ids": [0, 1]},
        {"timestamp": 2000, "input_length": 600, "output_length": 7, "hash_ids": [9, 10]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of = {"prompt": None, "output": None, "prefix": None, "trace": {"path": "t.jsonl"}}
    traffic = prompts.prepare(workload(arrivals={"process": "trace"}, **of), 6, vocabulary=WORDS, base=tmp_path)
    words = [traffic.messages(number)[0]["content"].split() for number in range(6)]
    assert [len(text) for text in words] == [1100, 1000, 600, 1100, 1000, 600]
    assert words[0][:1000] == words[1] and words[0][:9] != words[2][:9]
    assert words[0][:9] != words[3][:9], "a repetition of the trace has new blocks"
    assert words[3][:1000] == words[4]
    assert list(traffic.due_s)[:3] == [0.0, 0.5, 2.0]
    assert traffic.prefix_share == pytest.approx(2000 / 5400)
    scaled = prompts.prepare(
        workload(arrivals={"process": "trace", "rate_per_s": 10}, **of), 3000, vocabulary=WORDS, base=tmp_path
    )
    assert scaled.due_s[-1] == pytest.approx(300, rel=0.01)


def test_an_azure_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    of = {"prompt": None, "output": None, "prefix": None, "trace": {"path": "t.csv"}}
    traffic = prompts.prepare(workload(arrivals={"process": "trace"}, **of), 2, vocabulary=WORDS, base=tmp_path)
    assert list(traffic.prompt_tokens) == [374, 396] and list(traffic.output_tokens) == [44, 109]
    assert traffic.due_s[1] == pytest.approx(4.314579)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hello there"},
        {"question": "hello there"},
        {"turns": ["hello there", "and now"]},
        {"messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]},
    ],
)
def test_datasets_are_read_in_common_formats(row: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    of = {"prompt": None, "prefix": None, "dataset": {"path": "d.jsonl"}}
    traffic = prompts.prepare(workload(**of), 3, vocabulary=WORDS, base=tmp_path)
    assert traffic.messages(0) == [{"role": "user", "content": "hello there"}]
    assert list(traffic.prompt_tokens) == [2, 2, 2]
    assert traffic.text.repeats == 2
    again = prompts.prepare(
        workload(**of | {"dataset": {"path": "d.jsonl", "repeat": True}}), 3, vocabulary=WORDS, base=tmp_path
    )
    assert again.text.repeats == 0


def test_an_error_names_the_broken_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\nnonsense\n')
    with pytest.raises(InputError, match=r"d\.jsonl:2"):
        prompts.prepare(
            workload(prompt=None, prefix=None, dataset={"path": "d.jsonl"}), 3, vocabulary=WORDS, base=tmp_path
        )


def test_adapters_have_their_share() -> None:
    traffic = prompts.prepare(
        workload(adapters=[{"name": "a", "share": 0.25}, {"name": "b", "share": 0.5}]), 4000, vocabulary=WORDS
    )
    used = [adapter and adapter.name for adapter in traffic.adapters]
    shares = [used.count(name) / 4000 for name in ("a", "b", None)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


@pytest.mark.parametrize("name", catalog.names("workload"))
def test_every_catalogue_workload_can_be_prepared(name: str) -> None:
    entry = documents.find("workload", name)
    assert isinstance(entry, Workload) and entry.name == name and entry.description
    traffic = prompts.prepare(entry, 20, vocabulary=WORDS)
    assert all(traffic.messages(number)[-1]["content"] for number in range(20))
    assert 0 <= traffic.prefix_share < 1


@pytest.mark.parametrize("name", catalog.names("slo"))
def test_every_catalogue_slo_reads(name: str) -> None:
    assert documents.find("slo", name).name == name


def test_an_unknown_catalogue_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean 'chat'"):
        documents.find("workload", "chatt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"output": None}, "output is missing"),
        ({"arrivals": {"process": "trace"}}, "needs a trace"),
        ({"adapters": [{"name": "a", "share": 0.7}, {"name": "b", "share": 0.7}]}, "more than 1"),
        ({"trace": {"path": "x"}, "dataset": {"path": "y"}}, "not both"),
    ],
)
def test_an_inconsistent_workload_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(**changes)


def test_an_error_names_the_missing_key() -> None:
    with pytest.raises(DocumentError, match="output is missing"):
        documents.parse("powerband: workload/1\narrivals: {process: closed, users: 1}\n", source="w.yaml")


def test_turns_and_repeated_rows_are_cacheable(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"turns": ["one two three four", "five six"]}) + "\n")
    of = {"prompt": None, "prefix": None, "output": {"shape": "fixed", "tokens": 4}}
    once = workload(**of, dataset={"path": "d.jsonl"}, turns={"count": 2})
    traffic = prompts.prepare(once, 1, vocabulary=WORDS, base=tmp_path)
    assert traffic.prefix_share == pytest.approx(8 / 14), "of 4 + 10 tokens, 8 repeat the first turn"
    again = workload(**of, dataset={"path": "d.jsonl", "repeat": True})
    traffic = prompts.prepare(again, 4, vocabulary=WORDS, base=tmp_path)
    assert traffic.prefix_share == pytest.approx(0.75)
