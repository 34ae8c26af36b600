"""What a study decides with little data: estimates of a screen, early verdicts of a level, the use of its budget."""

import random

import pytest

from powerband.bench import sequential
from powerband.bench.monitor import CpuLimit, CpuTimes, background_share
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import Study, Trial
from powerband.core.workload import Workload
from powerband.errors import InputError, InvalidMeasurement, RequirementNotMet
from powerband.reports import study as study_report
from powerband.tune import budget, nothing_feasible, screen
from powerband.tune.budget import Durations
from powerband.tune.screen import Point

Q8 = {"engine": "one", "weights": "q8"}
SLO_1S = SLO.model_validate({"ttft": {"p90": "1s"}})


def queue_rate(service_s: float, limit_s: float) -> float:
    """Return the highest rate at which 90 % of the requests of a single-server queue wait less than a limit."""
    low, high = 0.0, 1 / service_s
    for _ in range(40):
        rate, rng = (low + high) / 2, random.Random(1)
        free, now, late = 0.0, 0.0, 0
        for _ in range(4000):
            now += rng.expovariate(rate)
            free = max(free, now) + rng.expovariate(1 / service_s)
            late += free - now > limit_s
        low, high = (rate, high) if late <= 400 else (low, rate)
    return low


def test_the_estimate_of_a_single_server_queue_is_near_its_max_rate() -> None:
    service_s = 0.2  # each user waits for the others
    points = [Point(users, 1 / service_s, {"ttft": users * service_s}) for users in (1, 5)]
    found = screen.estimate(points, SLO_1S)
    assert found and found.value == pytest.approx(queue_rate(service_s, 1.0), rel=0.25)
    assert found.low < found.value < found.high


def test_the_estimate_grows_with_throughput_and_shrinks_with_latency() -> None:
    def rate(throughput: float, ttft_s: float) -> float:
        points = [Point(1, 1.0, {"ttft": 0.1}), Point(8, throughput, {"ttft": ttft_s})]
        found = screen.estimate(points, SLO_1S)
        assert found
        return found.value

    assert rate(6.0, 0.5) > rate(3.0, 0.5) > rate(3.0, 1.5)


def test_a_deployment_that_misses_the_slo_with_one_user_has_no_estimate() -> None:
    slow = Point(1, 0.3, {"ttft": 1.5})
    assert screen.estimate([slow], SLO_1S) is None
    assert screen.excess(slow, SLO_1S) == pytest.approx(1.5)
    assert screen.late(slow, SLO_1S) == "TTFT p50 1500 ms (limit 1000 ms)"


def test_the_second_level_has_about_the_users_that_the_slo_allows_or_few_if_answers_take_long() -> None:
    assert screen.next_users([Point(1, 4.0, {"ttft": 0.2})], SLO_1S) == 5
    assert screen.next_users([Point(1, 4.0, {"ttft": 0.001})], SLO_1S) == 60
    assert screen.next_users([Point(1, 0.1, {"ttft": 0.001})], SLO_1S) == 8


def test_levels_go_on_while_more_users_gain_throughput_within_the_slo() -> None:
    """A GPU serves hundreds of users, and its throughput grows until then."""
    one, eight = Point(1, 1.0, {"ttft": 0.1}), Point(8, 7.0, {"ttft": 0.12})
    assert screen.next_users([one, eight], SLO_1S) == 48
    assert screen.next_users([one, Point(8, 1.5, {"ttft": 0.12})], SLO_1S) == 0, "throughput does not grow"
    assert screen.next_users([one, Point(8, 7.0, {"ttft": 1.2})], SLO_1S) == 0, "late"
    assert screen.next_users([one, eight, Point(2048, 300.0, {"ttft": 0.5})], SLO_1S) == 0, "the most that is measured"
    slow = Point(1, 0.1, {"ttft": 0.1}), Point(8, 0.7, {"ttft": 0.12})
    assert screen.next_users(slow, SLO_1S) == 10, "the first answers of more users would take long"


def test_a_verdict_is_early_only_when_the_rest_can_hardly_change_it() -> None:
    assert not sequential.meets(0, 11, 65, 0.1) and sequential.meets(0, 30, 65, 0.1)
    assert not sequential.meets(4, 30, 65, 0.1) and not sequential.misses(4, 30, 65, 0.1)
    assert sequential.misses(12, 14, 65, 0.1)
    assert sequential.probability_met(7, 30, 65, 0.1) == 0.0, "6 of 65 may be late"
    assert sequential.probability_met(0, 60, 65, 0.1) == 1.0
    shares = [sequential.probability_met(late, 30, 65, 0.1) for late in range(7)]
    assert shares == sorted(shares, reverse=True)


def times(busy: float, own: float, group: float | None, stolen: float = 0.0) -> CpuTimes:
    return CpuTimes(busy, stolen, own, group)


@pytest.mark.parametrize(
    ("last", "limit", "share"),
    [
        (times(12.0, 10.0, 10.0), CpuLimit(2, 2), 0.1),  # another cgroup takes our cores
        (times(12.0, 10.0, 12.0), CpuLimit(2, 2), 0.1),  # a process of our cgroup does
        (times(400.0, 10.0, 10.0), CpuLimit(64, 2), 0.0),  # others use cores that our limit leaves free
        (times(640.0, 10.0, 10.0), CpuLimit(64, 2), 0.5),  # until they are used up
        (times(400.0, 10.0, 13.0), CpuLimit(64, 2), 0.15),  # our cgroup's limit is shared
        (times(12.0, 10.0, None), CpuLimit(2, 2), 0.1),  # no cgroup accounting
        (times(12.0, 10.0, 4.0), CpuLimit(2, 2), 0.1),  # the measured server is in another cgroup
    ],
)
def test_cpu_of_other_cgroups_counts_only_beyond_what_our_limit_leaves_free(
    last: CpuTimes, limit: CpuLimit, share: float
) -> None:
    first = CpuTimes(0.0, 0.0, 0.0, None if last.group is None else 0.0)
    assert background_share(first, last, 10.0, limit)[0] == pytest.approx(share)


def test_stolen_cpu_is_background_load() -> None:
    found = background_share(times(0, 0, 0), times(10.0, 10.0, 10.0, stolen=4.0), 10.0, CpuLimit(2, 2))
    assert found == pytest.approx((0.2, 0.2))


def test_a_budget_that_cannot_look_beyond_the_defaults_is_refused() -> None:
    starts_s = {"vllm": 60.0, "llamacpp": 2.0}
    slow = Durations(requests=50, starts_s=starts_s, best_per_s=1.0, default_per_s=0.5, configurations=100)
    with pytest.raises(
        InputError, match=r"a budget of 60 s is too short: the defaults of vllm and llamacpp"
    ) as refused:
        budget.check(slow, 60.0)
    least_s = slow.least()
    assert f"--budget {-(-int(least_s) // 60)}min" in refused.value.hint
    budget.check(slow, least_s)
    assert slow.search_ends(least_s) >= 3 * slow.screen() * 0.5
    assert slow.search_ends(10 * least_s) == 5 * least_s


def test_the_first_line_says_what_a_budget_can_find() -> None:
    quick = Durations(requests=50, starts_s={"llamacpp": 2.0}, best_per_s=2.0, default_per_s=2.0, configurations=8)
    assert "looks at all 8 configurations" in budget.first_line(quick, 7200, None)
    many = Durations(requests=50, starts_s={"llamacpp": 2.0}, best_per_s=2.0, default_per_s=2.0, configurations=800)
    line = budget.first_line(many, 1200, None)
    assert line.startswith("expected duration 20 min: looks at about ") and " of 800 configurations" in line


def test_durations_are_learned_from_trials() -> None:
    default = {"engine": "llamacpp", "weights": "f16"}
    took = Durations(requests=50, starts_s={"llamacpp": 2.0}, best_per_s=11.5, default_per_s=11.5, gate_s=150.0)
    before_s = took.validation()
    trial = Trial(number=1, settings=default, outcome="feasible", max_rate_per_s=1.2, start_s=5.0)
    took.learn([trial], [default])
    assert took.starts_s == {"llamacpp": 5.0} and took.best_per_s == took.default_per_s == 1.2
    assert took.validation() > before_s and took.gate_s == 150.0
    both = Durations(starts_s={"llamacpp": 2.0, "vllm": 80.0})
    slow_start = {"settings": {"engine": "vllm", "weights": "bf16"}, "start_s": 90.0}
    both.learn([trial.model_copy(update=slow_start)], [default])
    one = Durations(starts_s={"vllm": 90.0}, best_per_s=1.2, default_per_s=1.2)
    assert both.validation() == one.validation(), "the leader's engine is started, not the mean of both"
    better = trial.model_copy(update={"settings": Q8, "max_rate_per_s": 2.4, "quality": "pass"})
    took.learn([trial, better], [default])
    assert (took.best_per_s, took.default_per_s) == (2.4, 1.2) and took.gate_s < 150.0, "the reference has answered"


def study(*trials: Trial) -> Study:
    tokens = {"shape": "fixed", "tokens": 10}
    workload = {"arrivals": {"process": "poisson", "rate_per_s": 1}, "prompt": tokens, "output": tokens}
    levers = {"one": {"weights": ("f16", "q8")}, "two": {"weights": ("bf16",)}}
    return Study(model="m", workload=Workload.model_validate(workload), slo=SLO_1S, levers=levers, trials=trials)


def test_a_study_without_a_recipe_names_the_nearest_configuration_and_what_would_help() -> None:
    near = Trial(number=1, settings=Q8, outcome="too slow", reason="1 user: late", excess=1.3)
    far = Trial(number=2, settings={"engine": "two", "weights": "bf16"}, outcome="too slow", excess=9.0)
    found = nothing_feasible(study(near, far))
    assert isinstance(found, RequirementNotMet)
    assert "2 of 3 were tried. Nearest: one  weights=q8, 1 user: late" in found.message
    assert found.hint == "choose bounds 1.3 times as long, a machine 1.3 times as fast, or a smaller model"
    page = study_report.page_without_recipe(study(near, far), found.message)
    assert page.index("one  weights=q8") < page.index("two default") and "1.30" in page


def test_a_study_whose_trials_were_all_disturbed_says_so() -> None:
    busy = Trial(number=1, settings=Q8, outcome="inconclusive", reason="background load")
    assert isinstance(nothing_feasible(study(busy)), InvalidMeasurement)


def test_a_trial_below_the_floor_is_the_nearest_if_none_was_too_slow() -> None:
    degraded = Trial(
        number=1,
        settings=Q8,
        outcome="below the floor",
        reason="kl_mean 0.4, limit 0.1",
        estimate_per_s=Interval(3.0, 2.0, 4.0),
    )
    found = nothing_feasible(study(degraded))
    assert "kl_mean 0.4" in found.message and "--quality" in found.hint
