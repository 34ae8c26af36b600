"""Fidelity, tasks and the floor: against sums done by hand and pairs whose truth is known."""

import math
import random

import pytest

from powerband.core.quality import Bound, QualityFloor
from powerband.core.scoring import Spot
from powerband.core.statistics import Interval
from powerband.engines.llamacpp import ENGINE as LLAMACPP
from powerband.engines.vllm import ENGINE as VLLM
from powerband.errors import DocumentError, InputError
from powerband.evaluate import judge
from powerband.evaluators import fidelity, tasks
from powerband.evaluators.fidelity import Compared
from powerband.store import documents


def spot(**likely: float) -> Spot:
    """A place whose tokens are called by letters."""
    top = tuple(sorted(((ord(name), math.log(p)) for name, p in likely.items()), key=lambda one: -one[1]))
    return Spot(top[0][1], top)


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
    assert not fidelity.spoiled([a, a], places, [a, a])
    assert not fidelity.spoiled([a, a], places, [a, b])  # as good as a tie
    assert fidelity.spoiled([a, a], places, [b, a])
    assert fidelity.spoiled([a, a], places, [ord("z"), a])


def test_intervals_of_a_mean_cover_it_as_often_as_they_say() -> None:
    rng, covered = random.Random(7), 0
    for number in range(200):
        texts = [Compared("x", 16, 16 * rng.expovariate(20), 15, 0.0) for _ in range(60)]
        found = fidelity.interval(texts, fidelity.FIGURES["kl_mean"], seed=number)
        covered += found.low <= 0.05 <= found.high
    assert 0.89 <= covered / 200 <= 0.99


def test_recovery_is_paired() -> None:
    rng = random.Random(3)
    reference = [rng.random() < 0.7 for _ in range(300)]
    same = tasks.recovery(reference, reference)
    assert same == Interval(1.0, 1.0, 1.0)
    worse = [one and rng.random() < 0.8 for one in reference]
    found = tasks.recovery(reference, worse)
    assert found.low < 0.8 < found.high and found.high < 0.9


def test_checks() -> None:
    ask = tasks.Question
    assert tasks.right(ask("", "Paris"), "It is paris.") and not tasks.right(ask("", "Paris"), "Rome")
    assert tasks.right(ask("", "1200", "number"), "so 5 and 1,200") and not tasks.right(ask("", "3", "number"), "none")
    assert tasks.right(ask("", "yes", "exact"), " Yes ") and tasks.right(ask("", r"^\d+$", "regex"), "42")
    with pytest.raises(InputError, match=r"task:2 is not a question"):
        tasks.read('{"prompt": "a", "answer": "b"}\nnonsense', source="task")


def test_a_bound_wants_the_whole_interval() -> None:
    bound = Bound(at_most=True, limit=0.05)
    assert bound.judge(Interval(0.02, 0.01, 0.04)) == "pass"
    assert bound.judge(Interval(0.07, 0.06, 0.08)) == "fail"
    assert bound.judge(Interval(0.045, 0.03, 0.06)) == "undecided"
    assert bound.samples_to_decide(Interval(0.04, 0.02, 0.06), 100) in (400, 401)


def floor(text: str) -> QualityFloor:
    found = documents.parse(f"powerband: quality/1\n{text}", source="floor")
    assert isinstance(found, QualityFloor)
    return found


def test_fidelity_rejects_and_only_tasks_or_closeness_pass() -> None:
    wanted = floor('fidelity: {kl_mean: "<= 0.05"}\ntasks: {recall: {recovery: ">= 0.98"}}')
    bound, recovery = wanted.fidelity["kl_mean"], wanted.tasks["recall"].recovery
    bad = judge.figure("kl_mean", "", Interval(0.2, 0.1, 0.3), 50, bound)
    good = judge.figure("kl_mean", "", Interval(0.02, 0.01, 0.03), 50, bound)
    scored = judge.figure("recall recovery", "", Interval(1.0, 0.99, 1.01), 200, recovery)
    assert judge.verdict(wanted, [bad, scored])[0] == "fail"
    assert judge.verdict(wanted, [good])[0] == "undecided"
    assert judge.verdict(wanted, [good, scored])[0] == "pass"
    nothing = judge.figure("kl_mean", "", Interval(0.001, 0.0005, 0.002), 50, bound)
    agreed = judge.figure("top1_agreement", "", Interval(0.99, 0.985, 0.995), 50, None)
    verdict, reason = judge.verdict(wanted, [nothing, agreed])
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
    assert first == Spot(-1.0, ((9, -0.5), (6, -1.0))) and second == Spot(-4.0, ((1, -0.1), (2, -3.0)))


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
    assert end.value.value == [Spot(-9.0, ((9, -0.1),))]
