"""Analysis of request records, checked against independent calculations."""

import math
import random
import statistics as oracle
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from powerband import metrics
from powerband.bench import _best, analysis, compare, crosscheck, profiles
from powerband.bench.level import Block, pool
from powerband.bench.level_controller import LevelController, Plan
from powerband.bench.profiles import Amount
from powerband.core.measurement import GRID, Distribution, Level, Measurement, SLOCheck, Timeline, Verdict
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Turns, Workload
from powerband.load import prompts, tokens
from powerband.load.generator import LoadProgress
from powerband.reports import console, html
from powerband.store import records as files

WORKLOAD = Workload.model_validate(
    {
        "arrivals": {"process": "poisson", "rate_per_s": 10},
        "prompt": {"shape": "fixed", "tokens": 10},
        "output": {"shape": "fixed", "tokens": 5},
    }
)


def records(count: int, *, seed: int = 1, scale: float = 1.0, output: int = 5, chunks: int = 5) -> Records:
    """Return requests every 100 ms; TTFT 100 ms plus an exponential part, gaps of 10 to 30 ms."""
    rng, made = random.Random(seed), Records()
    for number in range(count):
        due = number * 100_000_000
        first = due + int(scale * (100e6 + rng.expovariate(1 / 50e6)))
        gaps = [rng.randrange(10_000, 30_000) for _ in range(chunks - 1)]
        made.add(
            gaps, number=number, due=due, sent=due + 1000, head=first, first=first, end=first + 1000 * sum(gaps),
            status=200, outcome=0, done=1, retried=0, asked=output, prompt=10, output=output, chunks=chunks, finish=2,
            engine_us=0,
        )  # fmt: skip
    return made


def test_latency_definitions() -> None:
    made = records(1, output=9, chunks=5)
    due, first, end = made["due"][0], made["first"][0], made["end"][0]
    assert metrics.ttft(made)[0] == (first - due) / 1e9
    assert metrics.e2e(made)[0] == (end - due) / 1e9
    assert metrics.tpot(made)[0] == pytest.approx((end - first) / 8 / 1e9), (
        "TPOT uses the server's nine tokens, not the five chunks"
    )


def test_percentiles_agree_with_the_standard_library() -> None:
    made = records(1000)
    found = {name: analysis.distribution(sample) for name, sample in analysis.samples(made).items()}
    ttft = [(first - due) / 1e9 for first, due in zip(made["first"], made["due"], strict=True)]
    cuts = oracle.quantiles(ttft, n=100, method="inclusive")
    for name, index in (("p50", 49), ("p90", 89), ("p95", 94), ("p99", 98)):
        assert found["ttft"].percentiles[name].value == pytest.approx(cuts[index])
    gaps = oracle.quantiles([gap / 1e6 for gap in made.gaps], n=100, method="inclusive")
    assert found["itl"].percentiles["p95"].value == pytest.approx(gaps[94], rel=1e-6)
    assert found["ttft"].mean.value == pytest.approx(oracle.fmean(ttft))
    assert found["ttft"].unsupported == ("p99.9",)
    assert list(found) == ["ttft", "itl", "tpot", "e2e"]


def test_percentiles_with_too_few_samples_are_left_out() -> None:
    found = analysis.distribution(analysis.samples(records(60))["ttft"])
    assert set(found.percentiles) == {"p50", "p90"}
    assert set(found.unsupported) == {"p95", "p99", "p99.9"}


def test_slo_checks_count_failed_requests_as_beyond_the_bound() -> None:
    made = records(400)
    slo = SLO.model_validate({"ttft": {"p90": 0.3}})
    within = sum(value <= 0.3 for value in metrics.ttft(made))
    (check,) = analysis.slo_checks(slo, analysis.samples(made), failed=0)
    assert check.share.value == pytest.approx(within / 400) and check.verdict == "met"
    (check,) = analysis.slo_checks(slo, analysis.samples(made), failed=100)
    assert check.share.value == pytest.approx(within / 500) and check.verdict == "missed"


def test_goodput_counts_requests_that_meet_every_bound() -> None:
    made = records(300)
    slo = SLO.model_validate({"ttft": {"p50": 0.12, "p95": 0.2}, "e2e": {"p95": 0.28}, "itl": {"p50": 0.029}})
    expected = 0
    for row in range(300):
        due, first, end = made["due"][row], made["first"][row], made["end"][row]
        gaps = made.gaps_of(row)
        itl_met = sum(gap <= 29_000 for gap in gaps) >= 0.5 * len(gaps)
        expected += (first - due) / 1e9 <= 0.2 and (end - due) / 1e9 <= 0.28 and itl_met
    assert analysis.good(slo, made) == expected


def test_records_round_trip_through_a_file(tmp_path: Path) -> None:
    made = records(50)
    files.write(tmp_path / "r.npz", made)
    back = files.read(tmp_path / "r.npz")
    assert back.columns == made.columns and back.gaps == made.gaps


def test_reordered_records_keep_their_gaps() -> None:
    made = records(20)
    reversed_ = made.select(range(19, -1, -1))
    assert reversed_.gaps_of(0) == made.gaps_of(19)
    assert reversed_.ordered("due").columns == made.columns and reversed_.ordered("due").gaps == made.gaps
    both = records(20)
    both.extend(made)
    assert both.gaps_of(25) == made.gaps_of(5)


def test_requests_sent_to_an_idle_engine() -> None:
    made = records(3)
    for row, (sent, end) in enumerate(((0, 100), (99, 200), (200, 300))):
        made["sent"][row], made["end"][row] = sent, end
    assert crosscheck._sent_to_idle_engine(made) == [0, 2]


def level(seed: int, *, scale: float = 1.0, count: int = 300) -> Level:
    found = analysis.samples(records(count, seed=seed, scale=scale))
    return Level(
        rate_per_s=10, seeds=(seed,), warmup_s=1, window_s=30, requests=count, failed=0, achieved_per_s=10,
        prompt_tokens_per_s=1, output_tokens_per_s=1, tokens_per_chunk=1, client={}, verdicts=(),
        latencies={name: analysis.distribution(sample) for name, sample in found.items()},
        timeline=Timeline(at_s=(), in_flight=()),
    )  # fmt: skip


def measurement(one: Level, workload: Workload = WORKLOAD) -> Measurement:
    return Measurement(profile="level", workload=workload, levels=(one,))


def test_diff_detects_twenty_percent_and_not_noise() -> None:
    wrong = sum(
        compare.compare(measurement(level(seed)), measurement(level(1000 + seed))).different for seed in range(30)
    )
    assert wrong <= 3
    found = compare.compare(measurement(level(1)), measurement(level(2, scale=1.2)))
    verdicts = {(one.metric, one.percentile): one.verdict for one in found.differences}
    assert verdicts["ttft", "p50"] == "slower" and verdicts["itl", "p50"] == "same"


def test_diff_rejects_different_workloads() -> None:
    other = WORKLOAD.model_copy(update={"content": "code"})
    assert compare.compare(measurement(level(1)), measurement(level(2), other)).obstacles
    assert not compare.compare(measurement(level(1)), measurement(level(2), WORKLOAD.with_seed(9))).obstacles


def test_the_stored_quantile_function_is_interpolated() -> None:
    grid = tuple(p * 10 for p in GRID)
    for share in (0.0, 0.005, 0.5, 0.951, 0.9949, 0.997, 0.9995, 1.0):
        assert compare._at(grid, share) == pytest.approx(share * 10)


def test_a_measurement_round_trips_through_a_file(tmp_path: Path) -> None:
    from powerband.store import documents

    whole = measurement(level(3))
    (tmp_path / "m.json").write_text(whole.to_json())
    assert documents.read(tmp_path / "m.json") == whole


def at_rate(rate: float, *, meets: bool, failed: tuple[str, ...] = ()) -> Level:
    share = {"value": 1.0 if meets else 0.5, "low": 0.5, "high": 1.0}
    check = {"metric": "ttft", "percentile": "p95", "limit_s": 1, "value_s": 0.1, "share": share, "verdict": "met"}
    verdicts = tuple(Verdict(guard=guard, valid=False, sentence="") for guard in failed)
    of = {"rate_per_s": rate, "slo_checks": (SLOCheck.model_validate(check),), "verdicts": verdicts}
    return level(1, count=20).model_copy(update=of)


def test_the_best_load_is_below_every_load_that_misses_the_slo() -> None:
    met, missed = at_rate(1.0, meets=True), at_rate(1.2, meets=False)
    assert _best([met, missed]) == 0
    levels = [at_rate(1.1, meets=True), at_rate(1.0, meets=False), at_rate(0.9, meets=True)]
    assert _best(levels) == 2, "a load above one that misses the SLO does not count"
    assert _best([at_rate(1.1, meets=True), at_rate(1.1, meets=False)]) is None, "the last level of a load counts"
    disturbed = at_rate(0.8, meets=True, failed=("background load",))
    assert _best([met, disturbed]) == 0, "an inconclusive level is ignored"
    assert _best([met, at_rate(0.8, meets=True, failed=("overload",))]) is None
    single = met.model_copy(update={"rate_per_s": None, "users": 1})
    assert single.load == "concurrency 1" and _best([single]) == 0
    assert _best([at_rate(1.2, meets=False), single]) is None, "concurrency 1 is not a rate"


def test_guard_names_of_older_files_are_read() -> None:
    assert Verdict(guard="foreign load", valid=False, sentence="").guard == "background load"


def priced(*, prompt: int) -> Level:
    """Return a level at 3.6 $/h: 100 requests in 10 s with 5 output tokens each."""
    made = records(100)
    for row in range(100):
        made["prompt"][row] = prompt
    block = Block(
        plan=Plan(WORKLOAD, window_s=10, requests=100), measured=made, failed=0, errors={}, departed=100, warmup_s=1,
        window_s=10, client={}, engine={}, crosschecks=(), timeline=Timeline(at_s=(), in_flight=()), verdicts=(),
        early=None, decided=None, records_name="",
    )  # fmt: skip
    return pool([block], slo=SLO.model_validate({"ttft": {"p50": 1}}), price_per_h=3.6)


def test_cost_per_1m_tokens_counts_input_and_output_as_a_plan_does() -> None:
    found = priced(prompt=10)
    assert found.cost_per_1m_output_tokens == pytest.approx(3.6 / 3600 / 50 * 1e6)
    rate_per_s, prompt, output = 10, 10, 5
    assert found.cost_per_1m_tokens == pytest.approx(3.6 / 3600 / rate_per_s / ((prompt + output) / 1e6))
    assert priced(prompt=0).cost_per_1m_tokens is None, "the server reports no prompt tokens"


def test_reports_label_both_costs() -> None:
    whole = measurement(priced(prompt=10)).model_copy(
        update={"slo": SLO.model_validate({"ttft": {"p50": 1}}), "best": 0}
    )
    line = next(str(part) for part in console.measurement(whole) if "best" in str(part))
    assert "6.67 $ per 1M tokens (input and output), 20 $ per 1M output tokens" in line
    page = html.measurement(whole)
    assert "$ per 1M tokens</span><b>6.67</b>" in page and "$ per 1M output tokens</span><b>20</b>" in page


def test_an_slo_may_require_a_higher_success_rate_than_the_guard() -> None:
    assert at_rate(1, meets=True).meets_slo
    assert not at_rate(1, meets=True).model_copy(update={"answered_enough": False}).meets_slo


def test_diff_accepts_gaps_of_zero() -> None:
    nothing = level(1).latencies["itl"].model_copy(update={"grid": (0.0,) * len(GRID)})
    zero = replace(nothing.percentiles["p50"], value=0.0)
    nothing = nothing.model_copy(update={"percentiles": {"p50": zero}})
    one = level(1).model_copy(update={"latencies": {"itl": nothing}})
    assert not compare.compare(measurement(one), measurement(one)).different


class Server:
    """A simulated server that meets the SLO up to a known rate."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.tried = capacity, list[float]()

    def measure(self, plan: Plan) -> Level:
        rate = plan.requests / plan.window_s
        self.tried.append(rate)
        return at_rate(rate, meets=rate <= self.capacity)


@pytest.mark.parametrize(("capacity", "start"), [(7.3, 1.0), (0.4, 5.0), (30.0, 1.0), (1.0, 1.0)])
def test_a_climb_ends_just_below_the_capacity(capacity: float, start: float) -> None:
    slo = SLO.model_validate({"ttft": {"p95": 1}})
    server, best = Server(capacity), 0.0
    steps = profiles.climb(WORKLOAD, slo, Amount(), start_per_s=start, blocks=1)
    plan, _ = next(steps)
    while True:
        found = server.measure(plan)
        best = max(best, found.rate_per_s or 0.0) if profiles.meets_slo(found) else best
        try:
            plan, _ = steps.send(found)
        except StopIteration:
            break
    assert capacity / 1.15 <= best <= capacity
    assert len(server.tried) <= 16
    assert server.tried[-1] == pytest.approx(best, rel=0.02), "the result is confirmed"


def test_amount_of_requests_and_window() -> None:
    slo = SLO.model_validate({"ttft": {"p95": 1}})
    plan = Amount().plan(WORKLOAD, slo)
    assert plan.requests == 150 and plan.window_s == pytest.approx(15)
    assert Amount(window_s=4).plan(WORKLOAD, slo).requests == 40
    assert Amount(requests=30).plan(WORKLOAD, slo).window_s == pytest.approx(3)
    seeds = {Amount(seed=5).plan(WORKLOAD, slo, block=block).workload.seed for block in range(3)}
    assert seeds == {5, 6, 7}, "every block has its own seed"
    closed = Amount(requests=30).plan(WORKLOAD.with_users(4), slo)
    assert closed.by_count and closed.requests == 30
    assert not math.isinf(closed.window_s)
    assert isinstance(level(1).latencies["ttft"], Distribution)


def test_a_closed_loop_window_starts_when_each_user_has_one_answer() -> None:
    users = 32
    plan = Plan(WORKLOAD.with_users(users), window_s=10, requests=100, by_count=True)
    traffic = prompts.prepare(plan.workload, 200, vocabulary=tokens.vocabulary(None))
    controller = LevelController(plan, traffic, slo=None, stopping=threading.Event())
    for answered, warm_s in ((users - 1, None), (users, 20.0)):
        controller(LoadProgress(elapsed_s=20.0, finished=answered, in_flight=users), records(answered))
        assert controller.window_start_s == warm_s


@pytest.mark.parametrize(("bound_s", "answers"), [(0.09, 15), (0.2, None)])  # all answers late, a few late
def test_a_level_stops_if_most_answers_before_the_window_are_late(bound_s: float, answers: int | None) -> None:
    slo = SLO.model_validate({"ttft": {"p90": bound_s}})
    workload = WORKLOAD.model_copy(update={"turns": Turns(count=5)})
    traffic = prompts.prepare(workload, 200, vocabulary=tokens.vocabulary(None))
    plan = Plan(workload, window_s=5, requests=50, stop_early=True, by_count=True)
    controller = LevelController(plan, traffic, slo=slo, stopping=threading.Event())
    stopped_after = None
    for answered in range(1, 40):
        if controller(LoadProgress(elapsed_s=0.5, finished=answered, in_flight=5), records(answered)):
            stopped_after = answered
            break
    assert stopped_after == answers
    assert controller.window_start_s == (0.5 if answers else None), "the late answers are the measured ones"
