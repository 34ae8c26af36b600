"""Fidelity, tasks and the floor: against sums done by hand and pairs whose truth is known."""

import math
import random
from pathlib import Path

import pytest

from powerband import catalog
from powerband.core.quality import Bound, QualityFloor
from powerband.core.scoring import TokenDistribution
from powerband.core.statistics import Interval
from powerband.engines.llamacpp import ENGINE as LLAMACPP
from powerband.engines.vllm import ENGINE as VLLM
from powerband.errors import DocumentError, InputError
from powerband.evaluate import gate
from powerband.evaluate.tasks import spread
from powerband.evaluators import fidelity, graders, lm_eval, questions, recall
from powerband.evaluators.fidelity import Compared
from powerband.store import documents


def spot(**likely: float) -> TokenDistribution:
    """A place whose tokens are called by letters."""
    top = tuple(sorted(((ord(name), math.log(p)) for name, p in likely.items()), key=lambda one: -one[1]))
    return TokenDistribution(top[0][1], top)


def test_divergence_of_the_same_is_nothing_and_of_others_what_the_sum_says() -> None:
    one, other = spot(a=0.7, b=0.2), spot(a=0.5, b=0.4)
    assert fidelity.kl(one, one) == pytest.approx(0, abs=1e-12)
    by_hand = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.4) + 0.1 * math.log(0.1 / 0.1)
    assert fidelity.kl(one, other) == pytest.approx(by_hand)


def test_tokens_that_only_one_names_go_to_the_rest_and_never_raise_the_divergence() -> None:
    one, narrow = spot(a=0.6, b=0.3), spot(a=0.6, c=0.3)
    whole = 0.3 * math.log(0.3 / 0.05)  # if the other gave b half of what it does not name
    assert 0 <= fidelity.kl(one, narrow) <= whole


def test_an_answer_is_spoiled_where_the_choice_was_clear() -> None:
    places = [spot(a=0.9, b=0.05), spot(a=0.45, b=0.4)]
    a, b = ord("a"), ord("b")
    assert not fidelity.diverged([a, a], places, [a, a])
    assert not fidelity.diverged([a, a], places, [a, b])  # as good as a tie
    assert fidelity.diverged([a, a], places, [b, a])
    assert fidelity.diverged([a, a], places, [ord("z"), a])


def test_intervals_of_a_mean_cover_it_as_often_as_they_say() -> None:
    rng, covered = random.Random(7), 0
    for _ in range(200):
        texts = [Compared("x", 16, 16 * rng.expovariate(20), 15, 0.0) for _ in range(60)]
        found = fidelity.interval(texts, "kl_mean")
        covered += found.low <= 0.05 <= found.high
    assert 0.89 <= covered / 200 <= 0.99


def test_recovery_is_paired() -> None:
    rng = random.Random(3)
    reference = [float(rng.random() < 0.7) for _ in range(300)]
    same = questions.recovery(reference, reference)
    assert same.value == 1.0 and 0.97 < same.low < 1 < same.high < 1.03
    worse = [float(one and rng.random() < 0.8) for one in reference]
    found = questions.recovery(reference, worse)
    assert found.low < 0.8 < found.high and found.high < 0.9
    shares = [one * 0.5 + 0.25 for one in reference]  # a task may score parts
    assert questions.recovery(shares, [0.9 * one for one in shares]).value == pytest.approx(0.9)


def test_what_never_differed_is_not_sure_to_be_the_same() -> None:
    few, many = [1.0] * 20, [1.0] * 400
    assert questions.recovery(few, few).low < 0.95 < questions.recovery(many, many).low
    texts = [Compared("x", 16, 0.0, 16, 0.0)] * 12
    assert fidelity.interval(texts, "top1_agreement").low < 0.99


def test_our_own_task_can_be_answered() -> None:
    asked = recall.questions(40)
    assert asked == recall.questions(40) and len({one.prompt for one in asked}) == 40
    assert all(questions.right(one, f"It is so: {one.answer}.") and one.answer in one.prompt for one in asked)


def test_checks() -> None:
    ask = questions.Question
    assert questions.right(ask("", "Paris"), "It is paris.") and not questions.right(ask("", "Paris"), "Rome")
    assert questions.right(ask("", "1200", "number"), "so 5 and 1,200") and not questions.right(
        ask("", "3", "number"), "none"
    )
    assert questions.right(ask("", "yes", "exact"), " Yes ") and questions.right(ask("", r"^\d+$", "regex"), "42")
    with pytest.raises(InputError, match=r"task:2 is not a question"):
        questions.read('{"prompt": "a", "answer": "b"}\nnonsense', source="task")


def test_a_bound_wants_the_whole_interval() -> None:
    bound = Bound(at_most=True, limit=0.05)
    assert bound.judge(Interval(0.02, 0.01, 0.04)) == "pass"
    assert bound.judge(Interval(0.07, 0.06, 0.08)) == "fail"
    assert bound.judge(Interval(0.045, 0.03, 0.06)) == "undecided"
    assert bound.samples_to_decide(Interval(0.04, 0.02, 0.06), 100) in (400, 401)
    assert bound.samples_to_decide(questions.recovery([0.0] * 9, [0.0] * 9), 9) is None  # the reference never scored


def test_rows_come_from_all_over_the_data() -> None:
    chosen = spread(range(1000), 80)
    assert len(set(chosen)) == 80
    assert max(chosen[:10]) > 800 and min(chosen[:10]) < 200


def test_marks_of_the_harness() -> None:
    asked = {"answer": "so 2 + 2 = 4\n#### 1,004"}
    assert graders.number(asked, ["it is 1004.\nQuestion: 5"]) == {"score": 1.0}
    assert graders.letter({"answer": 1}, [" B."]) == {"score": 1.0} and graders.letter({"answer": 1}, ["no"]) == {
        "score": 0.0
    }
    wanted = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [{}, {}]}
    assert graders.followed(wanted, ["<<A title>>, and more"]) == {"score": 0.5}
    code = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    assert graders.passes(code, ["    return 1\nprint(1)"]) == {"score": 1.0}
    assert graders.passes(code, ["    return 2"]) == {"score": 0.0}
    assert graders.bytes_per_bit({"page": "abcd"}, [(-4 * math.log(2),)]) == {"score": pytest.approx(1.0)}


def test_the_harness_is_told_where_to_ask(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "?", "answer": "#### 4"}\n' * 30)
    lm_eval.write(tmp_path / "task", catalog.text("task", "gsm8k"), data)
    assert str(data) in (tmp_path / "task" / "task.yaml").read_text()
    step = lm_eval.command("py", "gsm8k", folder=tmp_path, url="http://127.0.0.1:1", model="m", tokenizer="t",
                           samples=[3, 1], at_once=2)  # fmt: skip
    assert "base_url=http://127.0.0.1:1/v1/completions" in step.argv[step.argv.index("--model_args") + 1]
    said = tmp_path / "said" / "m"
    said.mkdir(parents=True)
    (said / "samples_powerband_gsm8k_2026.jsonl").write_text('{"doc_id": 1, "score": 0}\n{"doc_id": 3, "score": 1}\n')
    assert lm_eval.scores(tmp_path, [3, 1]) == [1.0, 0.0]
    for task, words in (("wikitext", "does not tell"), ("humaneval", "runs code")):
        with pytest.raises(InputError, match=words):
            lm_eval.check(task, tells_prompts=False, run_code=False)


def floor(text: str) -> QualityFloor:
    found = documents.parse(f"powerband: quality/1\n{text}", source="floor")
    assert isinstance(found, QualityFloor)
    return found


def test_fidelity_rejects_and_only_tasks_or_closeness_pass() -> None:
    wanted = floor('fidelity: {kl_mean: "<= 0.05"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    bound, recovery = wanted.fidelity["kl_mean"], wanted.tasks["recall"].recovery
    bad = gate.figure("kl_mean", "", Interval(0.2, 0.1, 0.3), 50, bound)
    good = gate.figure("kl_mean", "", Interval(0.02, 0.01, 0.03), 50, bound)
    scored = gate.figure("recall recovery", "", Interval(1.0, 0.99, 1.01), 200, recovery)
    assert gate.verdict(wanted, [bad, scored])[0] == "fail"
    assert gate.verdict(wanted, [good])[0] == "undecided"
    assert gate.verdict(wanted, [good, scored])[0] == "pass"
    asks_more = floor('fidelity: {kl_mean: "<= 0.05", spoiled_long: "<= 0.3"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    verdict, reason = gate.verdict(asks_more, [good, scored])  # no room for a long context
    assert verdict == "undecided" and "spoiled_long could not be asked" in reason
    nothing = gate.figure("kl_mean", "", Interval(0.001, 0.0005, 0.002), 50, bound)
    agreed = gate.figure("top1_agreement", "", Interval(0.99, 0.985, 0.995), 50, None)
    verdict, reason = gate.verdict(wanted, [nothing, agreed])
    assert verdict == "pass" and "no task could tell" in reason


def test_a_floor_that_cannot_be_read_is_explained() -> None:
    for text in ('fidelity: {kl_men: "<= 1"}', 'fidelity: {kl_mean: "about 1"}', "tasks: {}"):
        with pytest.raises(DocumentError):
            floor(text)


def test_the_catalogues_floors_are_ordered() -> None:
    floors = [documents.find("quality", name) for name in ("strict", "balanced", "lenient")]
    limits = [one.fidelity["kl_mean"].limit for one in floors if isinstance(one, QualityFloor)]
    assert limits == sorted(limits) and len(limits) == 3


def test_vllm_tells_of_all_places_in_one_answer() -> None:
    talk = VLLM.score("m", [5, 6, 7], [1, 2], top=2)
    ask = next(talk)
    assert ask.path == "/v1/completions" and ask.body["prompt"] == [5, 6, 7]
    told = [
        None,
        {"6": {"logprob": -1.0}, "9": {"logprob": -0.5}},
        {"7": {"logprob": -4.0}, "1": {"logprob": -0.1}, "2": {"logprob": -3.0}},
    ]
    with pytest.raises(StopIteration) as end:
        talk.send({"choices": [{"prompt_logprobs": told}]})
    first, second = end.value.value
    assert first == TokenDistribution(-1.0, ((9, -0.5), (6, -1.0))) and second == TokenDistribution(
        -4.0, ((1, -0.1), (2, -3.0))
    )


def test_llamacpp_is_asked_place_by_place_and_once_more_for_an_unlikely_token() -> None:
    talk = LLAMACPP.score("m", [5, 6, 7], [1], top=1)
    assert next(talk).path == "/tokenize"
    ask = talk.send({"tokens": [40, 41]})
    assert ask.path == "/completion" and ask.body["prompt"] == [5] and ask.body["logit_bias"] == [[41, 100.0]]
    likely = {"id": 9, "logprob": -0.1}
    again = talk.send({"completion_probabilities": [{"top_logprobs": [likely]}]})
    assert again.body["n_probs"] > ask.body["n_probs"] == 1
    with pytest.raises(StopIteration) as end:
        talk.send({"completion_probabilities": [{"top_logprobs": [likely, {"id": 6, "logprob": -9.0}]}]})
    assert end.value.value == [TokenDistribution(-9.0, ((9, -0.1),))]
