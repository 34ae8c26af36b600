"""Search, validation and journal of `tune`, without starting an engine."""

import contextlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from powerband.bench.profiles import Amount, climb, closed_loop, inconclusive, max_rate, sustains
from powerband.core.engine import Lever
from powerband.core.measurement import GRID, Distribution, Level, SLOCheck, Timeline, Verdict
from powerband.core.recipe import Recipe
from powerband.core.slo import SLO
from powerband.core.statistics import UNBOUNDED, Interval
from powerband.core.study import Outcome, Settings, SpeculationResult, Study, Trial, rate_of, render_settings
from powerband.core.workload import Workload
from powerband.engines.vllm import VllmConfig
from powerband.errors import EngineError, InputError, InvalidMeasurement
from powerband.launchers import local
from powerband.runtime import devices
from powerband.store import documents
from powerband.store.journal import Journal
from powerband.tune import paired_comparison, recipe, resume, validation
from powerband.tune.search import Search
from powerband.tune.search_space import SearchSpace, key
from powerband.tune.spec import TuneSpec, make_runner
from powerband.tune.speculation import best_by_users, schedule, worthwhile
from powerband.tune.validation import Contender, _leaders, contender_of, exclusion_reason

SPACE = SearchSpace(
    {
        "one": (
            Lever(name="weights", settings={"f16": {}, "q8": {}, "q4": {}}, affects_quality=True),
            Lever(name="slots", settings={"4": {}, "8": {"parallel": 8}, "16": {"parallel": 16}}),
            Lever(name="chunk", settings={"big": {}, "small": {"batch_size": 128}}),
        ),
        "two": (
            Lever(name="weights", settings={"bf16": {}, "int8": {}}, affects_quality=True),
            Lever(name="batch", settings={"128": {}, "8": {"max_num_seqs": 8}, "32": {"max_num_seqs": 32}}),
        ),
    },
    {"one": {}, "two": {"kv": 4}},
)


def truth(settings: Settings) -> float:
    """Max rates where engine one with q4, 8 slots and small chunks is best, and the plan ignores chunks."""
    if settings["engine"] == "two":
        return {"bf16": 2.0, "int8": 2.6}[settings["weights"]] * {"128": 1.0, "8": 0.7, "32": 1.1}[settings["batch"]]
    rate = {"f16": 2.0, "q8": 3.0, "q4": 3.6}[settings["weights"]] * {"4": 0.8, "8": 1.0, "16": 0.9}[settings["slots"]]
    return rate * (1.2 if settings["chunk"] == "small" else 1.0)


def planned(settings: Settings) -> Interval:
    rate = truth({**settings, "chunk": "big"} if "chunk" in settings else settings) * 1.4
    return Interval(rate, rate / 2, rate * 2)


def traffic(**arrivals: str | int) -> Workload:
    tokens = {"shape": "fixed", "tokens": 10}
    return Workload.model_validate({"arrivals": arrivals, "prompt": tokens, "output": tokens})


SPEC = TuneSpec("golden", traffic(process="poisson", rate_per_s=1), SLO.model_validate({"e2e": {"p90": 1.0}}))


def study(search: Search, trials: int, value: Callable[[Settings], float] = truth) -> list[Trial]:
    """Run trials that all reach the last rung."""
    found: list[Trial] = []
    while len(found) < trials and (step := search.next(found)):
        rate = value(step.settings)
        outcome = "feasible" if rate else "failed"
        found.append(
            Trial(number=step.number, settings=step.settings, outcome=outcome, max_rate_per_s=rate, value=rate)
        )
    return found


def test_combinations_that_cannot_run_are_never_tried() -> None:
    cannot_run = {key(one): "too large" for one in SPACE if one.get("slots") == "16" or one.get("batch") == "32"}
    search = Search(replace(SPACE, cannot_run=cannot_run), expected=planned, seed=3)
    tried = {key(one.settings) for one in study(search, 100)}
    assert tried and not tried & cannot_run.keys()


@pytest.mark.parametrize("absent", ["optuna", "numpy"])
def test_a_search_without_its_extra_is_refused_at_once(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerband.tune.search.find_spec", lambda name: None if name == absent else object())
    with pytest.raises(InputError, match="needs Optuna"):
        Search(SPACE, expected=planned)


def screened(number: int, settings: Settings, rate: float) -> Trial:
    estimate = Interval(rate, rate / 2, rate * 2)
    return Trial(number=number, settings=settings, outcome="screened", estimate_per_s=estimate, value=rate)


def feasible(trial: Trial) -> Trial:
    return trial.model_copy(update={"outcome": "feasible", "max_rate_per_s": rate_of(trial)})


def test_settings_map_to_knobs_and_defaults() -> None:
    settings = {"engine": "one", "weights": "q8", "slots": "8", "chunk": "big"}
    assert SPACE.defaults("one") == {"engine": "one", "weights": "f16", "slots": "4", "chunk": "big"}
    assert SPACE.non_default(settings) == {"weights": "q8", "slots": "8"}
    assert SPACE.config(settings) == {"parallel": 8}
    assert SPACE.config(SPACE.defaults("two")) == {"kv": 4}
    assert SPACE.quality_settings(settings) == {"engine": "one", "weights": "q8"}
    assert len(SPACE) == 18 + 6 == len({key(one) for one in SPACE})


def test_settings_are_rendered_by_lever_without_defaults() -> None:
    settings = {"engine": "one", "weights": "q8", "slots": "4", "chunk": "small"}
    assert render_settings(settings, SPACE.all_defaults) == "one  weights=q8  chunk=small"
    assert render_settings(settings) == "one  weights=q8  slots=4  chunk=small"
    assert render_settings(SPACE.defaults("two"), SPACE.all_defaults) == "two default"


def test_the_search_looks_at_defaults_and_favourites_of_every_engine_before_it_climbs() -> None:
    search, found = Search(SPACE, expected=planned), list[Trial]()
    while (step := search.next(found)) and not step.climb:
        found.append(screened(step.number, step.settings, truth(step.settings)))
    assert [one.settings for one in found[:2]] == [SPACE.defaults("one"), SPACE.defaults("two")]
    assert [one.settings["engine"] for one in found[2:4]] == ["one", "two"]
    assert step and step.before == max(found, key=lambda one: one.value) and step.climb, (
        "then the highest estimate climbs"
    )
    after = search.next([*(one for one in found if one != step.before), feasible(step.before)])
    assert after and not after.climb and after.settings not in [one.settings for one in found], "then new settings"


def test_of_predictions_that_the_plan_cannot_tell_apart_the_one_nearest_to_the_defaults_is_the_favourite() -> None:
    def expected(one: Settings) -> Interval:
        rate = 4.0 + (one["weights"] == "q8") + 0.1 * (one.get("slots") == "16")  # 10 % apart are alike
        return Interval(rate, 0.0, UNBOUNDED)

    defaults = [screened(1, SPACE.defaults("one"), 4.0), screened(2, SPACE.defaults("two"), 4.0)]
    step = Search(SPACE, expected=expected).next(defaults)
    assert step and SPACE.non_default(step.settings) == {"weights": "q8"}


def test_finalists_climb_when_there_is_no_time_for_new_settings() -> None:
    search = Search(SPACE, expected=planned)
    found = [screened(number, one, truth(one)) for number, one in enumerate(list(SPACE)[::4], 1)]
    step = search.next([*found, *study(search, 4)], screen=False)
    assert step is None or step.climb


def test_a_disturbed_trial_is_tried_again_after_another_one() -> None:
    search, found = Search(SPACE, expected=planned), study(Search(SPACE, expected=planned), 4)
    found[1] = found[1].model_copy(update={"outcome": "inconclusive", "value": 0.0, "max_rate_per_s": None})
    again = search.next(found)
    assert again and again.before == found[1] and again.climb
    found = [*found[:1], *found[2:], found[1].model_copy(update={"tries": 2})]
    after = search.next(found)
    assert after and after.before is None, "something else is tried in between"
    found = [found[-1].model_copy(update={"tries": 3}), *found[:-1]]
    given_up = search.next(found)
    assert given_up and given_up.before is None


def test_a_search_ends_where_nothing_untried_can_win() -> None:
    whole = study(Search(SPACE, expected=planned), 100)
    assert max(one.value for one in whole) == max(map(truth, SPACE)) and len(whole) < len(SPACE)
    assert len({key(one.settings) for one in whole}) == len(whole)


def test_predictions_are_corrected_by_the_trials_of_their_engine() -> None:
    search = Search(SPACE, expected=lambda one: Interval(10 * truth(one), 0.0, UNBOUNDED))
    default, other = SPACE.defaults("one"), {"engine": "one", "weights": "q8", "slots": "4", "chunk": "big"}
    found = [screened(1, default, truth(default)), screened(2, SPACE.defaults("two"), truth(SPACE.defaults("two")))]
    corrected = search.corrected(other, found)
    assert corrected and corrected.value == pytest.approx(truth(other), rel=0.1)
    assert corrected.low < truth(other) < corrected.high < UNBOUNDED


def test_the_next_settings_depend_only_on_the_trials_so_far() -> None:
    whole = study(Search(SPACE, expected=planned, seed=3), 9)
    again = Search(SPACE, expected=planned, seed=3)
    step = again.next(whole[:7])
    assert step and step.settings == whole[7].settings


def test_the_search_with_a_plan_beats_random_search() -> None:
    best = max(map(truth, SPACE))
    ours, at_random = [], []
    for seed in range(10):
        ours.append(max(one.value for one in study(Search(SPACE, expected=planned, seed=seed), 8)) / best)
        drawn = random.Random(seed).sample(list(SPACE), 8)
        at_random.append(max(map(truth, drawn)) / best)
    assert sum(one >= 0.95 for one in ours) >= 9
    assert sum(ours) > sum(at_random)


def test_settings_that_are_the_only_suspect_of_a_failure_are_excluded() -> None:
    def value(settings: Settings) -> float:
        return 0.0 if settings.get("slots") == "16" else truth(settings)

    tried = study(Search(SPACE, expected=planned), 20, value)
    assert sum(one.settings.get("slots") == "16" for one in tried) <= 3


def test_a_setting_that_only_failed_beside_another_suspect_is_tried_without_it() -> None:
    """The best settings share a lever with three failures, whose other lever is the cause."""
    search, default = Search(SPACE, expected=planned), SPACE.defaults("one")
    bad = [default | {"slots": "16", "weights": "q4", "chunk": chunk} for chunk in ("big", "small")]
    found = [screened(1, default, 1.0), screened(2, SPACE.defaults("two"), 0.5)]
    found += [Trial(number=3 + number, settings=one, outcome="failed") for number, one in enumerate(bad)]
    tried = []
    while step := search.next(found):
        tried.append(step.settings)
        trial = screened(step.number, step.settings, truth(step.settings))
        found = [*(one for one in found if one.number != step.number), feasible(trial) if step.climb else trial]
    assert any(one["weights"] == "q4" and one.get("slots") != "16" for one in tried)
    assert not any(one["weights"] == "q4" and one.get("slots") == "16" for one in tried)


def test_draft_length_is_chosen_by_users_and_dropped_where_it_is_slower() -> None:
    speeds = {1: {0: 50, 4: 80, 12: 90}, 2: {0: 80, 4: 110, 12: 100}, 4: {0: 120, 4: 121, 12: 90}, 8: {0: 150, 4: 120}}
    found = [
        SpeculationResult(
            engine="vllm",
            setting=f"ngram-{drafts}" if drafts else "off",
            drafts=drafts,
            users=users,
            tokens_per_s=speed,
        )
        for users, by_drafts in speeds.items()
        for drafts, speed in by_drafts.items()
    ]
    assert best_by_users(found) == {1: 12, 2: 4, 4: 0, 8: 0}
    assert schedule(best_by_users(found), max_sequences=64) == ((1, 1, 12), (2, 3, 4), (4, 64, 0))
    lever = Lever(name="speculation", settings={"off": {}, "ngram-4": {"k": 4}, "ngram-12": {"k": 12}}, drafts=True)
    kept = worthwhile(lever, found)
    assert list(kept.settings) == ["off", "ngram-12", "ngram-4", "ngram-by-batch"]
    config = kept.settings["ngram-by-batch"]["speculative_config"]
    assert VllmConfig(speculative_config=config).speculative_config is not None
    losing = [one.model_copy(update={"tokens_per_s": 50.0}) if one.drafts else one for one in found]
    own = SearchSpace({"vllm": (*SPACE.by_engine["two"], lever)}, {"vllm": {}})
    assert len(own.with_lever("vllm", worthwhile(lever, losing)).by_engine["vllm"]) == 2


def test_rounds_are_interleaved() -> None:
    assert list(paired_comparison.interleave("AB", 2)) == [(0, "A"), (0, "B"), (1, "B"), (1, "A")]


@pytest.mark.parametrize(("contenders", "rounds"), [(2, 4), (3, 3), (5, 3)])
def test_equal_contenders_are_rarely_told_apart(contenders: int, rounds: int) -> None:
    rng, claimed, runs = random.Random(contenders), 0, 2000
    for _ in range(runs):
        drift = [rng.gauss(0, 0.3) for _ in range(rounds)]
        rates = {
            name: [math.exp(drift[number] + rng.gauss(0, 0.08)) for number in range(rounds)]
            for name in "ABCDE"[:contenders]
        }
        found = paired_comparison.ratio(rates, "A", "B")
        claimed += found.low > 1 or found.high < 1
    assert 0.03 <= claimed / runs <= 0.065


def test_extra_rounds_for_the_leaders_do_not_inflate_false_positives() -> None:
    finalists, defaults = ([Contender(name, {}, 1.0) for name in names] for names in ("AB", "CD"))
    rng, claimed, runs = random.Random(1), 0, 2000
    for _ in range(runs):
        rates = {name: [math.exp(rng.gauss(0, 0.2)) for _ in range(3)] for name in "ABCD"}
        best, rival = _leaders(rates, finalists, defaults)
        for one in (best, rival):
            rates[one.name] += [math.exp(rng.gauss(0, 0.2)) for _ in range(3)]
        claimed += paired_comparison.ratio(rates, best.name, rival.name, level=0.975).low > 1
    assert claimed / runs <= 0.05
    assert paired_comparison.ratio({"A": [4.0, 4.2, 9.0], "B": [2.0, 2.1]}, "A", "B").value == pytest.approx(2)


def test_the_best_finalist_can_be_the_best_default() -> None:
    own, other, default = (Contender(name, {}, 1.0) for name in ("own", "other", "default"))
    rates = {"own": [3.0], "other": [2.0], "default": [4.0]}
    assert _leaders(rates, [own, other], [default]) == (own, default)
    assert _leaders(rates, [own, default], [default]) == (default,)
    assert _leaders({"own": [3.0]}, [own], [default]) == (own,)
    with pytest.raises(InvalidMeasurement, match="no finalist met the SLO"):
        _leaders({"default": [4.0]}, [own], [default])


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [("too slow", "two default meets the SLO at no request rate"), ("failed", "two default was not measured: it hung")],
)
def test_a_failed_baseline_is_not_reported_as_too_slow(outcome: Outcome, reason: str, tmp_path: Path) -> None:
    runner = make_runner(replace(SPEC, engines=("fake",)), tmp_path)
    runner.space = SPACE
    trial = Trial(number=1, settings=SPACE.defaults("two"), outcome=outcome, reason="it hung")
    assert exclusion_reason(contender_of(runner, trial)) == reason


def test_a_default_that_is_clearly_slower_is_not_validated(tmp_path: Path) -> None:
    runner = make_runner(replace(SPEC, engines=("fake",)), tmp_path)
    runner.space = SPACE

    def trial(engine: str, low: float, high: float) -> Trial:
        estimate = Interval((low * high) ** 0.5, low, high)
        return Trial(number=1, settings=SPACE.defaults(engine), outcome="screened", estimate_per_s=estimate)

    slow, quick = validation._defaults(runner, [trial("two", 0.19, 0.48), trial("one", 1.08, 2.77)])
    assert slow.start_per_s is None and quick.start_per_s
    assert exclusion_reason(slow).startswith("two default was not measured: its screen estimates at most 0.48 req/s")
    near = validation._defaults(runner, [trial("two", 0.5, 1.2), trial("one", 1.0, 2.7)])
    assert all(one.start_per_s for one in near)


async def test_a_failure_during_validation_is_not_reported_as_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(replace(SPEC, engines=("fake",)), tmp_path)
    starts = []

    def launch(*_: object, **__: object) -> None:
        starts.append(1)
        raise EngineError("it died\nof hunger", hint="feed it")

    monkeypatch.setattr(local, "launch", launch)
    pair = [Contender(name, runner.space.defaults("fake"), 1.0) for name in "AB"]
    assert await validation.measure_interleaved(runner, "validation", pair, 3) == {}
    assert [exclusion_reason(one) for one in validation._with_failures(runner, "validation", pair)] == [
        "A was not measured: it died",
        "B was not measured: it died",
    ]
    assert len(starts) == 4, "each contender is started twice and then skipped"
    failed, _ = validation._with_failures(runner, "validation", pair)
    assert validation._compare({}, "B", failed).why == "it died"
    assert not validation._compare({"A": [1.0], "B": [2.0]}, "B", failed).why, "it was measured before it failed"


@pytest.mark.parametrize(
    ("took_s", "phases"), [(100.0, ["validation", "confirm"]), (10.0, ["validation", "confirm", "ablation"])]
)
async def test_the_ablation_runs_last_and_only_if_time_is_left(
    took_s: float, phases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(replace(SPEC, engines=("fake",)), tmp_path)
    runner.space = SPACE
    best = {"engine": "two", "weights": "int8", "batch": "128"}
    trial = Trial(number=1, settings=best, outcome="feasible", max_rate_per_s=1.0, value=1.0, seconds=10.0)
    ran: list[str] = []

    async def measure_interleaved(
        _: object, phase: str, contenders: list[Contender], rounds: int
    ) -> paired_comparison.MaxRates:
        ran.append(phase)
        for number in range(rounds):
            Journal(tmp_path / f"{phase}.jsonl").add({"round": number, "name": "", "seconds": took_s})
        return {one.name: [1.0] * rounds for one in contenders}

    async def confirm_rate(*_: object) -> None:
        ran.append("confirm")

    async def quality_check(_: Settings) -> dict[str, bool]:
        return {"passed": True}

    monkeypatch.setattr(validation, "measure_interleaved", measure_interleaved)
    monkeypatch.setattr(validation, "_confirm_rate", confirm_rate)
    monkeypatch.setattr(runner, "quality_check", quality_check)
    monkeypatch.setattr(recipe, "build_recipe", lambda *_, ablation, **__: ablation)
    study = Study(model=SPEC.model, workload=SPEC.workload, slo=SPEC.slo, trials=(trial,))
    ablation = await validation.validate(runner, study, budget_s=200.0)
    assert ran == phases
    assert bool(ablation) == ("ablation" in phases)


def test_a_difference_beyond_the_noise_is_significant() -> None:
    found = paired_comparison.ratio({"A": [3.0, 3.3, 2.8, 3.1], "B": [2.0, 2.1, 1.95, 2.0]}, "A", "B")
    assert found.low > 1 and found.low < 1.5 < found.high
    assert paired_comparison.ratio({"A": [2.0], "B": [1.0]}, "A", "B").low == 0.0


def level(rate: float, p95: float, *, achieved: float | None = None, limit: float = 1.0) -> Level:
    grid = tuple(p95 * share / 0.95 for share in GRID)
    mean = Interval(p95 / 2, p95 / 2, p95 / 2)
    share = Interval(0.99 if p95 <= limit else 0.8, 0.7, 1.0)
    return Level(
        rate_per_s=rate,
        seeds=(0,),
        warmup_s=1,
        window_s=10,
        requests=100,
        failed=0,
        achieved_per_s=achieved or rate,
        slo_checks=(SLOCheck(metric="ttft", percentile="p95", limit_s=limit, value_s=p95, share=share, verdict="met"),),
        prompt_tokens_per_s=1,
        output_tokens_per_s=1,
        tokens_per_chunk=1,
        latencies={"ttft": Distribution(count=100, effective=100, mean=mean, percentiles={}, grid=grid)},
        client={},
        timeline=Timeline(at_s=(), in_flight=()),
        verdicts=(),
    )


def test_the_max_rate_is_interpolated_where_the_bound_is_met() -> None:
    found = max_rate([level(2.0, 0.5), level(2.6, 2.0)])
    assert found == pytest.approx(math.sqrt(2.0 * 2.6), rel=1e-6)  # half and twice the bound: half way, in logarithms
    assert max_rate([level(2.0, 0.5)]) == 2.0
    assert max_rate([level(2.0, 1.5)]) is None
    assert 2.0 < (max_rate([level(2.0, 0.99), level(2.6, 4.0)]) or 0.0) < 2.05


def test_the_max_rate_of_a_closed_loop_is_its_throughput() -> None:
    users = {"rate_per_s": None, "users": 32}
    assert max_rate([level(0.0, 0.5, achieved=1.7).model_copy(update=users)]) == 1.7
    assert max_rate([level(0.0, 1.5, achieved=1.7).model_copy(update=users)]) is None
    alone = level(0.0, 0.5, achieved=0.2).model_copy(update={"rate_per_s": None, "users": 1})
    assert max_rate([level(4.0, 1.5), alone]) is None, "concurrency 1 is no rate"
    assert max_rate([level(4.0, 1.5), alone, level(2.0, 0.5)]) == pytest.approx(
        max_rate([level(4.0, 1.5), level(2.0, 0.5)])
    )


def test_an_unsteady_closed_loop_is_inconclusive_and_an_unsteady_rate_is_not() -> None:
    unsteady = (Verdict(guard="steady state", valid=False, sentence="not steady"),)
    rate = level(2.0, 0.5).model_copy(update={"verdicts": unsteady})
    assert not inconclusive(rate) and inconclusive(rate.model_copy(update={"rate_per_s": None, "users": 32}))


@pytest.mark.parametrize(("answered_per_s", "requests"), [(1.7, [64]), (38.0, [64, 380])])
def test_a_fast_closed_loop_is_measured_again_with_more_requests(answered_per_s: float, requests: list[int]) -> None:
    workload = traffic(process="closed", users=32)
    steps = closed_loop(workload, SLO.model_validate({"e2e": {"p90": "1s"}}), Amount(min_requests=50))
    found: list[int] = []
    plan, _ = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            assert plan.workload == workload.with_seed(len(found)) and plan.by_count
            found.append(plan.requests)
            plan, _ = steps.send(level(0.0, 0.5, achieved=answered_per_s))
    assert found == requests


def test_a_closed_loop_sustains_a_rate_by_its_throughput() -> None:
    workload = traffic(process="closed", users=32)
    assert workload.at_rate_if_open(2.0) == workload
    assert traffic(process="poisson", rate_per_s=1).at_rate_if_open(2.0).rate_per_s == 2.0
    users = level(0.0, 0.5, achieved=2.0).model_copy(update={"rate_per_s": None, "users": 32})
    assert sustains(users, 1.9) and not sustains(users, 2.1)
    assert sustains(level(2.0, 0.5, achieved=1.9), 2.0)  # for an open loop the guards decide


def test_a_coarse_climb_brackets_the_max_rate_and_stops_below_the_minimum() -> None:
    workload = traffic(process="poisson", rate_per_s=1)

    def run(start: float, minimum: float, *, slow: bool = False, verdicts: tuple[Verdict, ...] = ()) -> list[float]:
        slo = SLO.model_validate({"ttft": {"p95": "1s"}})
        steps = climb(workload, slo, Amount(requests=100), start_per_s=start, min_per_s=minimum, coarse=True)
        rates = []
        plan, _ = next(steps)
        try:
            while True:
                rate = plan.workload.rate_per_s or 0.0  # None: concurrency 1
                rates.append(round(rate, 3))
                late = "more answers are late" if slow else None
                found = level(rate, 2.0 if slow or rate > 3 else 0.5)
                verdict = () if rate else verdicts
                plan, _ = steps.send(found.model_copy(update={"stopped_early": late, "verdicts": verdict}))
        except StopIteration:
            return rates

    assert run(2.5, 0.0) == [2.5, 3.75]
    assert run(4.0, 0.0) == [4.0, 0.0, 2.667]
    assert run(4.0, 0.0, slow=True) == [4.0, 0.0], "a miss at concurrency 1 is a miss at any rate"
    busy = (Verdict(guard="background load", valid=False, sentence="busy"),)
    assert len(run(4.0, 0.0, slow=True, verdicts=busy)) > 2, "unless a guard rejects that level"
    assert run(4.0, 4.0) == [4.0]
    assert run(4.0, 3.5) == [4.0, 0.0, 3.5], "the last rate is the minimum"


def test_a_journal_drops_an_incomplete_last_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "notes.jsonl")
    journal.add({"number": 1})
    journal.add({"number": 2})
    with journal.path.open("a") as stream:
        stream.write('{"number": ')
    assert journal.read() == [{"number": 1}, {"number": 2}]
    journal.add({"number": 3})
    assert [json.loads(line)["number"] for line in journal.path.read_text().splitlines()] == [1, 2, 3]


def test_a_study_does_not_resume_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levers, here = SearchSpace({"fake": ()}, {}), devices.this_host()
    resume.check_spec(SPEC, levers, tmp_path)
    noted = (tmp_path / "spec.json").read_text()
    resume.check_spec(replace(SPEC, budget_s=60.0, model="elsewhere/golden"), levers, tmp_path)
    monkeypatch.setattr(devices, "this_host", lambda: here.model_copy(update={"cpu_name": "a slower one"}))
    with pytest.raises(InputError, match=r"holds trials with another machine$"):
        resume.check_spec(SPEC, levers, tmp_path)
    assert (tmp_path / "spec.json").read_text() == noted


def test_a_recipe_round_trips_through_its_file() -> None:
    ratio = {"value": 1.5, "low": 1.2, "high": 1.9}
    data = {
        "summary": "better",
        "model": "m",
        "model_digest": "a",
        "scheme": "q8_0",
        "weights_digest": "b",
        "engine_version": "1",
        "deployment": {"powerband": "deployment/1", "engine": "fake", "variant": {"source": "m"}},
        "settings": {"engine": "fake"},
        "promise": {
            "slo": {"ttft": {"p95": "1s"}},
            "rate_per_s": 2.0,
            "attainment": {"value": 0.99, "low": 0.97, "high": 1.0},
        },
        "workload": {
            "arrivals": {"process": "poisson", "rate_per_s": 1},
            "prompt": {"shape": "fixed", "tokens": 10},
            "output": {"shape": "fixed", "tokens": 10},
        },
        "validity": {"turns": {"low": 1, "high": 1}},
        "usd_per_h": 0.09,
        "usd_per_1m_tokens": 0.4,
        "baselines": [{"name": "d", "settings": {}, "max_rate_per_s": 1.0, "ratio": ratio}],
        "command": "llama-server",
    }
    recipe = Recipe.model_validate(data)
    again = documents.parse(recipe.to_text(), source="recipe.yaml")
    assert isinstance(again, Recipe) and again.digest() == recipe.digest()


def test_a_setting_that_is_the_only_suspect_of_degraded_answers_is_excluded() -> None:
    refused = {"engine": "one", "weights": "q4", "slots": "8", "chunk": "small"}
    found = study(Search(SPACE, expected=planned), 2)
    found.append(Trial(number=3, settings=refused, outcome="below the floor"))
    search, seen = Search(SPACE, expected=planned), []
    while step := search.next(found):
        seen.append(step.settings)
        rate = truth(step.settings)
        found.append(
            Trial(number=step.number, settings=step.settings, outcome="feasible", value=rate, max_rate_per_s=rate)
        )
    assert seen and all(one["weights"] != "q4" for one in seen)


def test_a_trial_that_was_too_slow_clears_no_quality_suspect() -> None:
    """Int8 with fp8 is refused; bf16 with fp8 is too slow for a quality check, so fp8 stays a suspect."""
    weights = Lever(name="weights", settings={"bf16": {}, "int8": {}}, affects_quality=True)
    cache = Lever(name="cache", settings={"auto": {}, "fp8": {}}, affects_quality=True)
    search = Search(SearchSpace({"two": (weights, cache)}, {"two": {}}))

    def tried(weights: str, cache: str, outcome: str) -> Trial:
        settings = {"engine": "two", "weights": weights, "cache": cache}
        return Trial.model_validate({"number": 1, "settings": settings, "outcome": outcome})

    found = [
        tried("bf16", "auto", "feasible"),
        tried("int8", "fp8", "below the floor"),
        tried("bf16", "fp8", "too slow"),
    ]
    step = search.next(found)
    assert step and step.settings == {"engine": "two", "weights": "int8", "cache": "auto"}


def test_a_noisy_third_contender_does_not_widen_the_interval_of_the_others() -> None:
    rates = {"a": [2.16, 3.42, 2.72], "b": [1.37, 2.11, 1.70], "c": [0.65, 0.48, 0.49]}
    found = paired_comparison.ratio(rates, "a", "b")
    assert 1.5 < found.low < 1.6 < found.high < 1.7
    assert paired_comparison.ratio(rates, "a", "c").low < 4 < paired_comparison.ratio(rates, "a", "c").high
