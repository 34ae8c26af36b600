"""Each guard at its limit and just over it, with its sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from powerband.bench import guards
from powerband.bench.guards import Evidence
from powerband.core.engine import Gauges
from powerband.core.measurement import CrossCheck
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload

WORKLOAD = Workload.model_validate(
    {
        "arrivals": {"process": "poisson", "rate_per_s": 2},
        "prompt": {"shape": "fixed", "tokens": 10},
        "output": {"shape": "fixed", "tokens": 10},
    }
)
NATURAL = WORKLOAD.model_copy(update={"ending": "natural"})


def records(
    count: int = 100,
    *,
    lag_s: float = 0.0,
    ttft_s: Sequence[float] = (0.1,),
    e2e_s: Sequence[float] = (1.0,),
    output: int = 10,
    chunks: int = 10,
    asked: int = 10,
) -> Records:
    found = Records()
    for number in range(count):
        due = number * 10**9
        first, end = (
            due + round(1e9 * values[number * len(values) // count]) for values in (ttft_s, e2e_s)
        )  # the parts of a sequence, one after another
        sent = due + round(1e9 * lag_s)
        columns: dict[str, int] = dict.fromkeys(("head", "outcome", "retried", "prompt", "finish", "engine_us"), 0)
        columns |= {"number": number, "due": due, "sent": sent, "first": first, "end": end, "status": 200, "done": 1}
        found.add((), **columns, output=output, chunks=chunks, asked=asked)
    return found


def evidence(**more: Any) -> Evidence:
    usual: dict[str, Any] = {
        "workload": WORKLOAD, "slo": None, "records": records(), "failed": 0, "unanswered": 0, "errors": {},
        "window_s": 50.0, "arrived": 100, "departed": 100, "mean_in_flight": 4.0, "users": 0, "capped": False,
        "client_cpu_share": 0.1, "repeats": 0, "cacheable_share": 0.0,
    }  # fmt: skip
    return Evidence(**usual | more)


def test_a_clean_run_passes_every_guard() -> None:
    verdicts = list(guards.judge(evidence()))
    assert [one.guard for one in verdicts] == list(guards.GUARDS) and all(one.valid for one in verdicts)
    sentences = {one.guard: one.sentence for one in verdicts}
    assert sentences["overload"] == "not detected: Saturation"
    assert sentences["lost answers"] == "not detected: Failed requests, or answers shorter than requested"


def test_a_finding_is_an_invalid_verdict() -> None:
    (found,) = [one for one in guards.judge(evidence(died="signal 9")) if not one.valid]
    assert (found.guard, found.sentence) == ("engine restart", "the engine died (signal 9)")
    assert found.hint == "read the engine's log"


def test_a_client_without_spare_cpu() -> None:
    assert guards.client_late(evidence(client_cpu_share=0.85)) is None
    assert guards.client_late(evidence(client_cpu_share=0.8501, capped=True)) == (
        "the client used 85% of a CPU core (limit 85%), so latencies include client delay",
        "raise --senders, run the client on another machine, or lower the load",
    )


def test_a_client_that_sends_late() -> None:
    assert guards.client_late(evidence(records=records(lag_s=0.010))) is None
    late = records(lag_s=0.011)
    assert guards.client_late(evidence(records=late)) == (
        "the client sent requests 11 ms late at p50 (limit 10 ms)",
        "free CPU on the client's machine, or lower the load",
    )
    assert guards.client_late(evidence(records=late, capped=True)) is None
    assert guards.client_late(evidence(records=records(0))) is None
    # with long waits, a twentieth of the TTFT at the same percentile is allowed
    assert guards.client_late(evidence(records=records(lag_s=0.050, ttft_s=[1.0]))) is None
    assert guards.client_late(evidence(records=records(lag_s=0.051, ttft_s=[1.0]))) is not None


@pytest.mark.parametrize(("late", "percentile"), [(60, 50), (10, 95), (3, 99)])
def test_a_client_that_sends_some_requests_late(late: int, percentile: int) -> None:
    found = records(100)
    for row in range(late):
        found["sent"][row] += 30_000_000
    sentence = guards.client_late(evidence(records=found))
    assert sentence and sentence[0] == f"the client sent requests 30 ms late at p{percentile} (limit 10 ms)"


def test_saturation() -> None:
    assert guards.overload(evidence(unanswered=1, users=4)) is None
    assert guards.overload(evidence(unanswered=1)) == (
        "saturated: latency is queueing time (1 of 100 requests unanswered after the drain period, limit 0)",
        "lower --rate, or find the highest rate within the SLO with --profile climb",
    )
    # 5 % of many requests, and four standard deviations of the requests in flight
    assert guards.overload(evidence(arrived=1000, departed=950, mean_in_flight=0.0)) is None
    assert guards.overload(evidence(arrived=1000, departed=949, mean_in_flight=0.0)) == (
        "saturated: latency is queueing time (20 req/s offered, 19 req/s answered; shortfall 5%, limit 5%)",
        "lower --rate, or find the highest rate within the SLO with --profile climb",
    )
    assert guards.overload(evidence(arrived=100, departed=84, mean_in_flight=15.0)) is None
    found = guards.overload(evidence(arrived=100, departed=83, mean_in_flight=15.0))
    assert found and "(2 req/s offered, 1.66 req/s answered; shortfall 17%, limit 16%)" in found[0]


def test_fewer_requests_in_flight_than_users() -> None:
    assert guards.concurrency(evidence(users=100, mean_in_flight=95.0)) is None
    assert guards.concurrency(evidence(users=2, mean_in_flight=1.8)) == (
        "1.8 requests were in flight on average, with 2 users (minimum 1.9)",
        "measure longer with --requests, lower --users, or raise --max-in-flight",
    )
    assert guards.concurrency(evidence(users=1, mean_in_flight=0.2)) is None


def test_lost_answers() -> None:
    assert guards.lost(evidence(records=records(999), failed=1)) is None
    assert guards.lost(evidence(records=records(998), failed=1)) == (
        "1 of 999 requests failed, limit 0.1%",
        "read the engine's log; if answers may end early, set 'ending: natural' in the workload",
    )
    assert guards.lost(evidence(records=records(0))) is None
    short = records(100, output=9)
    errors = {"HTTP 503": 2, "connection lost": 1, "HTTP 500": 1, "HTTP 400": 1}
    found = guards.lost(evidence(records=short, failed=5, errors=errors))
    assert found and found[0] == (
        "5 of 105 requests failed and 100 answers were shorter than requested, limit 0.1% "
        "(2 x HTTP 503; 1 x connection lost; 1 x HTTP 500)"
    )
    assert guards.lost(evidence(records=short, workload=NATURAL)) is None
    assert guards.lost(evidence(records=records(100, output=11))) is None


def test_repeated_prompts() -> None:
    assert guards.repeated(evidence(repeats=1)) is None
    assert guards.repeated(evidence(repeats=2, failed=1)) == (
        "2 of 101 requests repeat an earlier prompt (limit 1%)",
        "provide more prompts than requests, or set 'repeat: true' for the dataset if real traffic repeats prompts",
    )
    assert guards.repeated(evidence(repeats=1, records=records(0)))


def test_a_warm_prefix_cache() -> None:
    def gauges(hits: float, queries: float = 1000.0) -> list[Gauges]:
        zero = Gauges(prefix_queries_tokens=0.0, prefix_hits_tokens=0.0)
        return [zero, Gauges(prefix_queries_tokens=queries, prefix_hits_tokens=hits)]

    assert guards.repeated(evidence(gauges=gauges(600.0), cacheable_share=0.5)) is None
    assert guards.repeated(evidence(gauges=gauges(601.0), cacheable_share=0.5)) == (
        "60% prefix-cache hits, but the workload shares only 50% of its prompt tokens (limit 60%)",
        "the prefix cache holds prompts of an earlier run: use another --seed, or restart the engine",
    )
    assert guards.repeated(evidence(gauges=gauges(0.0, 0.0))) is None
    without_hits = [Gauges(prefix_queries_tokens=0.0), Gauges(prefix_queries_tokens=9.0)]
    assert guards.repeated(evidence(gauges=without_hits)) is None


def test_preemptions() -> None:
    assert guards.preempted(evidence(gauges=[Gauges(preemptions=3.0)] * 2)) is None
    assert guards.preempted(evidence(gauges=[Gauges(preemptions=3.0), Gauges(preemptions=5.0)])) == (
        "the engine preempted 2 requests (limit 0): its KV cache is too small for this load",
        "increase the engine's KV cache, lower its maximum batch size, or lower the load",
    )


def test_token_counts() -> None:
    wrong = "the server's usage is wrong: report it to the server's developers"
    assert guards.tokens_disagree(evidence(records=records(output=0))) == (
        "the server reports no usage, so output tokens cannot be counted",
        "use a server that supports stream_options.include_usage",
    )
    assert guards.tokens_disagree(evidence(records=records(0))) is None
    assert guards.tokens_disagree(evidence(records=records(output=100, asked=100, chunks=103))) is None
    assert guards.tokens_disagree(evidence(records=records(output=100, asked=100, chunks=104))) == (
        "the server sent 10400 content events but reports 10000 output tokens (limit 3% more)",
        wrong,
    )
    assert guards.tokens_disagree(evidence(records=records(output=103, asked=100, chunks=100))) is None
    more = records(output=104, asked=100, chunks=100)
    assert guards.tokens_disagree(evidence(records=more)) == (
        "the server reports 10400 output tokens but 10000 were requested (limit 3% more)",
        wrong,
    )
    assert guards.tokens_disagree(evidence(records=more, workload=NATURAL)) is None


def test_a_client_and_an_engine_that_count_differently() -> None:
    def check(what: str, client: float) -> list[CrossCheck]:
        return [CrossCheck(what=what, client=client, engine=100.0)]

    assert guards.tokens_disagree(evidence(crosschecks=check("output tokens", 97.0))) is None
    assert guards.tokens_disagree(evidence(crosschecks=check("ttft", 50.0))) is None
    both = check("ttft", 50.0) + check("output tokens", 96.0)
    assert guards.tokens_disagree(evidence(crosschecks=both)) == (
        "the client received 96 output tokens but the engine counted 100 (difference 4.0%, limit 3%)",
        "stop other clients of this server, then measure again",
    )


@pytest.mark.parametrize("name", ["output_tokens", "prompt_tokens"])
def test_an_engine_whose_counters_decrease(name: str) -> None:
    def gauges(*values: float | None) -> list[Gauges]:
        return [Gauges(**{name: value}) for value in values]

    assert guards.restarted(evidence(gauges=gauges(1.0, None, 1.0, 5.0))) is None
    assert guards.restarted(evidence(gauges=gauges(5.0, None, 4.0, 9.0))) == (
        f"the engine restarted during the measurement: its {name} decreased",
        "read the engine's log",
    )


def test_too_few_requests_for_the_slo() -> None:
    slo = SLO.model_validate({"ttft": {"p95": 1.0}})
    assert guards.too_few(evidence(slo=slo, records=records(100))) is None
    assert guards.too_few(evidence(slo=slo, records=records(99))) == (
        "p95 needs at least 100 requests, 99 were measured",
        "measure longer with --requests 150",
    )
    assert guards.too_few(evidence(records=records(10))) is None
    found = guards.too_few(evidence(records=records(9)))
    assert found and found[0] == "p50 needs at least 10 requests, 9 were measured"


def test_sessions_longer_than_the_warm_up() -> None:
    assert guards.unsteady(evidence(session_s=30.0, warmup_s=30.0)) is None
    assert guards.unsteady(evidence(session_s=31.0, warmup_s=30.0)) == (
        "not in steady state: sessions take 31 s (median) but the warm-up took 30 s, so later turns are missing "
        "from the window",
        "lower turns.count or turns.think_s in the workload",
    )


@pytest.mark.parametrize(
    ("more", "name", "ratio"),
    [
        ({"ttft_s": [0.1, 0.2]}, "TTFT", "2.00"),
        ({"ttft_s": [0.2, 0.1]}, "TTFT", "0.50"),
        ({"e2e_s": [1.0, 1.3]}, "E2E", "1.30"),
    ],
)
def test_a_latency_that_drifts(more: dict[str, Any], name: str, ratio: str) -> None:
    assert guards.unsteady(evidence(records=records(40, **more))) == (
        f"not in steady state: the median {name} of the second half is {ratio} times that of the first "
        "(limit 0.80 to 1.25)",
        "measure longer with --duration, or lower the load",
    )
    assert guards.unsteady(evidence(records=records(39, **more))) is None


@pytest.mark.parametrize("latencies", [[1.0, 1.25], [1.25, 1.0], [1.0]])
def test_a_drift_up_to_the_limit_is_allowed(latencies: list[float]) -> None:
    assert guards.unsteady(evidence(records=records(100, e2e_s=latencies))) is None


def test_background_load() -> None:
    assert guards.background_load(evidence(background_cpu_share=None)) is None
    assert guards.background_load(evidence(background_cpu_share=0.15, stolen_cpu_share=0.1)) is None
    hint = "stop other processes on this machine, then measure again"
    assert guards.background_load(evidence(background_cpu_share=0.16, stolen_cpu_share=0.02)) == (
        "background CPU load was 16% (limit 15%)",
        hint,
    )
    found = guards.background_load(evidence(background_cpu_share=0.5, stolen_cpu_share=0.03))
    assert found == ("background CPU load was 50% (limit 15%), including 3% CPU steal", hint)
