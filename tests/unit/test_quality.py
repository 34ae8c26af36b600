"""Fidelity figures, tasks and the quality floor, checked against hand-computed values and simulated pairs."""

import math
import random
from pathlib import Path

import pytest

from powerband import catalog, inputs
from powerband.core.quality import Bound, QualityFloor
from powerband.core.scoring import TokenDistribution
from powerband.core.statistics import Interval
from powerband.engines.llamacpp import ENGINE as LLAMACPP
from powerband.engines.vllm import ENGINE as VLLM
from powerband.errors import DocumentError, InputError
from powerband.evaluate import EvaluateSpec, gate
from powerband.evaluate.probes import SAMPLES_PER_CLASS, probes, reserve, scored_positions
from powerband.evaluate.tasks import QuestionTask, spread
from powerband.evaluators import fidelity, graders, lm_eval, questions, recall
from powerband.evaluators.fidelity import TextComparison
from powerband.store import documents


def distribution(**probabilities: float) -> TokenDistribution:
    """Return a distribution over tokens that are named by letters."""
    top = tuple(sorted(((ord(name), math.log(p)) for name, p in probabilities.items()), key=lambda one: -one[1]))
    return TokenDistribution(top[0][1], top)


def test_kl_of_equal_distributions_is_zero_and_of_others_matches_a_hand_computed_sum() -> None:
    one, other = distribution(a=0.7, b=0.2), distribution(a=0.5, b=0.4)
    assert fidelity.kl(one, one) == pytest.approx(0, abs=1e-12)
    by_hand = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.4) + 0.1 * math.log(0.1 / 0.1)
    assert fidelity.kl(one, other) == pytest.approx(by_hand)


def test_tokens_that_only_one_side_lists_are_merged_and_never_raise_the_kl() -> None:
    one, narrow = distribution(a=0.6, b=0.3), distribution(a=0.6, c=0.3)
    full = 0.3 * math.log(0.3 / 0.05)  # if the other gives b half of its unlisted probability
    assert 0 <= fidelity.kl(one, narrow) <= full


def test_an_answer_diverges_only_where_the_reference_clearly_prefers_its_token() -> None:
    distributions = [distribution(a=0.9, b=0.05), distribution(a=0.45, b=0.4)]
    a, b = ord("a"), ord("b")
    assert not fidelity.diverged([a, a], distributions, [a, a])
    assert not fidelity.diverged([a, a], distributions, [a, b])  # nearly a tie
    assert fidelity.diverged([a, a], distributions, [b, a])
    assert fidelity.diverged([a, a], distributions, [ord("z"), a])


def test_intervals_of_a_mean_have_their_nominal_coverage() -> None:
    rng, covered = random.Random(7), 0
    for _ in range(200):
        texts = [TextComparison("x", 16, 16 * rng.expovariate(20), 15, 0.0) for _ in range(60)]
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
    shares = [one * 0.5 + 0.25 for one in reference]  # a task may give partial scores
    assert questions.recovery(shares, [0.9 * one for one in shares]).value == pytest.approx(0.9)


def test_an_interval_is_not_empty_when_no_difference_was_observed() -> None:
    few, many = [1.0] * 20, [1.0] * 400
    assert questions.recovery(few, few).low < 0.95 < questions.recovery(many, many).low
    texts = [TextComparison("x", 16, 0.0, 16, 0.0)] * 12
    assert fidelity.interval(texts, "top1_agreement").low < 0.99


def test_recall_questions_are_reproducible_and_contain_their_answers() -> None:
    found = recall.questions(40)
    assert found == recall.questions(40) and len({one.prompt for one in found}) == 40
    assert all(questions.is_correct(one, f"It is so: {one.answer}.") and one.answer in one.prompt for one in found)


def test_checks() -> None:
    question = questions.Question
    assert questions.is_correct(question("", "Paris"), "It is paris.") and not questions.is_correct(
        question("", "Paris"), "Rome"
    )
    assert questions.is_correct(question("", "1200", "number"), "so 5 and 1,200") and not questions.is_correct(
        question("", "3", "number"), "none"
    )
    assert questions.is_correct(question("", "yes", "exact"), " Yes ") and questions.is_correct(
        question("", r"^\d+$", "regex"), "42"
    )
    with pytest.raises(InputError, match=r"task:2: not a valid question"):
        questions.read('{"prompt": "a", "answer": "b"}\nnonsense', source="task")


def test_a_bound_is_met_only_by_the_whole_interval() -> None:
    bound = Bound(at_most=True, limit=0.05)
    assert bound.judge(Interval(0.02, 0.01, 0.04)) == "pass"
    assert bound.judge(Interval(0.07, 0.06, 0.08)) == "fail"
    assert bound.judge(Interval(0.045, 0.03, 0.06)) == "undecided"
    assert bound.samples_to_decide(Interval(0.04, 0.02, 0.06), 100) in (400, 401)
    assert bound.samples_to_decide(questions.recovery([0.0] * 9, [0.0] * 9), 9) is None  # the reference never scored


def test_selected_rows_span_the_data() -> None:
    chosen = spread(range(1000), 80)
    assert len(set(chosen)) == 80
    assert max(chosen[:10]) > 800 and min(chosen[:10]) < 200


def test_graders_of_the_harness() -> None:
    doc = {"answer": "so 2 + 2 = 4\n#### 1,004"}
    assert graders.number(doc, ["it is 1004.\nQuestion: 5"]) == {"score": 1.0}
    assert graders.letter({"answer": 1}, [" B."]) == {"score": 1.0} and graders.letter({"answer": 1}, ["no"]) == {
        "score": 0.0
    }
    instructions = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [{}, {}]}
    assert graders.followed(instructions, ["<<A title>>, and more"]) == {"score": 0.5}
    code = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    assert graders.passes(code, ["    return 1\nprint(1)"]) == {"score": 1.0}
    assert graders.passes(code, ["    return 2"]) == {"score": 0.0}
    assert graders.bytes_per_bit({"page": "abcd"}, [(-4 * math.log(2),)]) == {"score": pytest.approx(1.0)}


def test_the_harness_command_and_its_scores(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "?", "answer": "#### 4"}\n' * 30)
    lm_eval.write(tmp_path / "task", catalog.text("task", "gsm8k"), data)
    assert str(data) in (tmp_path / "task" / "task.yaml").read_text()
    step = lm_eval.command("py", "gsm8k", folder=tmp_path, url="http://127.0.0.1:1", model="m", tokenizer="t",
                           samples=[3, 1], concurrency=2)  # fmt: skip
    assert "base_url=http://127.0.0.1:1/v1/completions" in step.argv[step.argv.index("--model_args") + 1]
    output = tmp_path / "output" / "m"
    output.mkdir(parents=True)
    (output / "samples_powerband_gsm8k_2026.jsonl").write_text('{"doc_id": 1, "score": 0}\n{"doc_id": 3, "score": 1}\n')
    assert lm_eval.scores(tmp_path, [3, 1]) == [1.0, 0.0]
    for task, message in (("wikitext", "does not return"), ("humaneval", "runs code")):
        with pytest.raises(InputError, match=message):
            lm_eval.check(task, echoes_prompt_logprobs=False, run_code=False)


def floor(text: str) -> QualityFloor:
    found = documents.parse(f"powerband: quality/1\n{text}", source="floor")
    assert isinstance(found, QualityFloor)
    return found


def test_fidelity_can_fail_and_only_tasks_or_an_indistinguishable_candidate_pass() -> None:
    required = floor('fidelity: {kl_mean: "<= 0.05"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    bound, recovery = required.fidelity["kl_mean"], required.tasks["recall"].recovery
    bad = gate.figure("kl_mean", "", Interval(0.2, 0.1, 0.3), 50, bound)
    good = gate.figure("kl_mean", "", Interval(0.02, 0.01, 0.03), 50, bound)
    scored = gate.figure("recall recovery", "", Interval(1.0, 0.99, 1.01), 200, recovery)
    assert gate.verdict(required, [bad, scored])[0] == "fail"
    assert gate.verdict(required, [good])[0] == "undecided"
    assert gate.verdict(required, [good, scored])[0] == "pass"
    with_long = floor('fidelity: {kl_mean: "<= 0.05", diverged_long: "<= 0.3"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    verdict, reason = gate.verdict(with_long, [good, scored])  # the long chats do not fit the context
    assert verdict == "undecided" and "diverged_long could not be measured" in reason
    tiny = gate.figure("kl_mean", "", Interval(0.001, 0.0005, 0.002), 50, bound)
    agreed = gate.figure("top1_agreement", "", Interval(0.99, 0.985, 0.995), 50, None)
    verdict, reason = gate.verdict(required, [tiny, agreed])
    assert verdict == "pass" and "indistinguishable" in reason


def test_what_is_measured_at_the_length_of_the_traffic_can_only_fail_a_deployment() -> None:
    required = floor('fidelity: {kl_mean: "<= 0.05", kl_late: "<= 0.1"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    bounds, recovery = required.fidelity, required.tasks["recall"].recovery
    good = gate.figure("kl_mean", "", Interval(0.02, 0.01, 0.03), 50, bounds["kl_mean"])
    scored = gate.figure("recall recovery", "", Interval(1.0, 0.99, 1.01), 200, recovery)
    few = gate.figure("kl_late", "", Interval(0.05, 0.01, 0.3), 2, bounds["kl_late"])
    faulty = gate.figure("kl_late", "", Interval(1.5, 0.8, 3.0), 2, bounds["kl_late"])
    assert gate.verdict(required, [good, scored])[0] == "pass"  # short traffic has no such figure
    assert gate.verdict(required, [good, scored, few])[0] == "pass"
    assert gate.verdict(required, [good, scored, faulty])[0] == "fail"


def test_long_traffic_adds_probes_of_its_length() -> None:
    short, long = probes(traffic_tokens=300), probes(traffic_tokens=4000)
    assert short == probes() and not {one.kind for one in short.texts} & {"late"}
    late = [one for one in long.texts if one.kind == "late"]
    depth = [one for one in long.chats if one.kind == "depth"]
    assert len(late) == len(depth) == 12 and all(one.tokens == 4000 for one in late)
    assert len({one.text for one in late}) == 12 and all(len(one.text) > 3.5 * 4000 for one in late)
    places = [one.turns[0].index("Remember this code") / len(one.turns[0]) for one in depth]
    assert [round(one, 1) for one in places[:3]] == [0.1, 0.5, 0.9]
    assert len([one for one in probes(traffic_tokens=100_000).texts if one.kind == "late"]) == 2
    positions = scored_positions(range(4000), "late")
    assert len(positions) == 16 and min(positions) == 3000 and max(positions) < 4000


def test_an_undecided_verdict_has_a_reserve_of_other_probes_and_questions() -> None:
    first, others = probes(), reserve()
    assert not {one.text for one in first.texts} & {one.text for one in others.texts}
    assert not set(first.chats) & set(others.chats)
    assert not {one.text for one in others.texts} & set(catalog.calibration_texts())
    assert len(others.chats) == len(set(others.chats)) == 3 * (40 - SAMPLES_PER_CLASS + 80)
    required = floor('fidelity: {kl_mean: "<= 0.05"}\ntasks: {recall: {recovery: ">= 0.9"}}')
    recalled = inputs.tasks((), required, source="model", max_questions=200)["recall"]
    assert recalled.size == 200 and recalled.further and recalled.further.size == 400
    asked = QuestionTask(recall.questions(200), recall.questions(600)[200:])
    spec = EvaluateSpec(required, first, others, tasks={"recall": asked})
    rest, half = spec.of_reserve(60), spec.of_reserve(600)
    assert rest and rest.share == 1 and rest.probes == others and rest.tasks["recall"].size == 400
    assert half and half.share == 0.5  # of three times as much: half an hour exceeds the limit
    assert not spec.of_reserve(6000) and not rest.of_reserve(60)


def test_an_invalid_floor_is_rejected() -> None:
    for text in ('fidelity: {kl_men: "<= 1"}', 'fidelity: {kl_mean: "about 1"}', "tasks: {}"):
        with pytest.raises(DocumentError):
            floor(text)


def test_the_catalogues_floors_are_ordered() -> None:
    floors = [documents.find("quality", name) for name in ("strict", "balanced", "lenient")]
    limits = [one.fidelity["kl_mean"].limit for one in floors if isinstance(one, QualityFloor)]
    assert limits == sorted(limits) and len(limits) == 3


def test_vllm_scores_all_positions_in_one_request() -> None:
    exchange = VLLM.score("m", [5, 6, 7], [1, 2], top=2)
    request = next(exchange)
    assert request.path == "/v1/completions" and request.body["prompt"] == [5, 6, 7]
    logprobs = [
        None,
        {"6": {"logprob": -1.0}, "9": {"logprob": -0.5}},
        {"7": {"logprob": -4.0}, "1": {"logprob": -0.1}, "2": {"logprob": -3.0}},
    ]
    with pytest.raises(StopIteration) as end:
        exchange.send({"choices": [{"prompt_logprobs": logprobs}]})
    first, second = end.value.value
    assert first == TokenDistribution(-1.0, ((9, -0.5), (6, -1.0))) and second == TokenDistribution(
        -4.0, ((1, -0.1), (2, -3.0))
    )


def test_llamacpp_scores_one_position_per_request_and_repeats_it_for_an_unlikely_token() -> None:
    exchange = LLAMACPP.score("m", [5, 6, 7], [1], top=1)
    assert next(exchange).path == "/tokenize"
    request = exchange.send({"tokens": [40, 41]})
    assert request.path == "/completion" and request.body["prompt"] == [5]
    assert request.body["logit_bias"] == [[41, 100.0]]
    likely = {"id": 9, "logprob": -0.1}
    repeated = exchange.send({"completion_probabilities": [{"top_logprobs": [likely]}]})
    assert repeated.body["n_probs"] > request.body["n_probs"] == 1
    with pytest.raises(StopIteration) as end:
        exchange.send({"completion_probabilities": [{"top_logprobs": [likely, {"id": 6, "logprob": -9.0}]}]})
    assert end.value.value == [TokenDistribution(-9.0, ((9, -0.1),))]


def test_floors_of_0_1_stay_readable() -> None:
    old = floor('fidelity: {kl_mean: "<= 0.05", spoiled: "<= 0.2", spoiled_long: "<= 0.3"}')
    assert set(old.fidelity) == {"kl_mean", "diverged", "diverged_long"}
