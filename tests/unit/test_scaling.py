"""The autoscaler: forecasts, ledger, decisions."""

from __future__ import annotations

import math
import random

import pytest

from powerband.serve.autoscaling import simulation
from powerband.serve.autoscaling.autoscaler import Autoscaler
from powerband.serve.autoscaling.forecast import DemandHistory, compared_sizes
from powerband.serve.autoscaling.ledger import Candidate, Ledger
from powerband.serve.autoscaling.policy import ScalingPolicy
from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed
from powerband.serve.autoscaling.simulation import Faults
from powerband.serve.autoscaling.snapshot import FleetSnapshot

SPEED = ReplicaSpeed(slots=4, step_s=0.02, prompt_token_s=0.0005, sequence_s=0.0025)
POLICY = ScalingPolicy(rate_per_s=1.0, slots=4, start_s=20.0, max_replicas=12)


def snapshot(at_s: float, arrived: int, **more: int) -> FleetSnapshot:
    return FleetSnapshot(at_s, **{"ready": 4, "starting": 0, "waiting": 0, "running": 0, "arrived": arrived, **more})


def trace(*phases: tuple[float, float], seed: int = 0) -> list[Arrival]:
    """Return Poisson arrivals of phases of (rate, seconds)."""
    rng, now_s, found, begin_s = random.Random(seed), 0.0, list[Arrival](), 0.0
    for rate, seconds in phases:
        now_s = begin_s
        while (now_s := now_s + rng.expovariate(rate)) < begin_s + seconds:
            found.append(Arrival(now_s, 200, 100))
        begin_s += seconds
    return found


def play(
    requests: list[Arrival], *, start_s: float = 20.0, initial: int = 12, faults: Faults | None = None
) -> tuple[simulation.SimulationResult, Autoscaler]:
    scaler = Autoscaler(ScalingPolicy(1.0, 4, start_s, max_replicas=12))
    result = simulation.simulate(
        requests, SPEED, scaler.desired_replicas, initial_replicas=initial, start_s=start_s, faults=faults
    )
    return result, scaler


def test_the_service_time_that_a_rate_implies_keeps_the_attainment_in_a_simulated_queue() -> None:
    policy = ScalingPolicy(rate_per_s=2.0, slots=8, start_s=1.0, attainment=0.95, queue_timeout_s=0.5)
    rng, free_s, waited = random.Random(1), [0.0] * 8, []
    now_s = 0.0
    for _ in range(40_000):
        now_s += rng.expovariate(2.0)
        begin_s = max(now_s, min(free_s))
        waited.append(begin_s - now_s)
        free_s[free_s.index(min(free_s))] = begin_s + rng.expovariate(1 / policy.service_s)
    assert abs(sum(one <= 0.5 for one in waited) / len(waited) - 0.95) < 0.015


def test_the_history_tells_what_each_size_would_have_missed() -> None:
    history = DemandHistory(POLICY, bins=100)
    last = snapshot(0.0, 0)
    for second in range(1, 401):  # twice the rate of one replica's slots and service time
        now = snapshot(float(second), second * 2)
        history.observe(last, now)
        last = now
    demand = 2 * POLICY.service_s / POLICY.slots  # replicas
    seen = history.recent(40)
    assert seen.requests == 400 and seen.span_s == 200.0
    for size, late in zip(history.sizes, seen.late, strict=True):
        assert late / seen.requests == pytest.approx(max(0.0, 1 - size / demand), abs=0.02)
    assert history.everything().span_s == pytest.approx(400, rel=0.01)


def test_large_fleets_compare_few_sizes_and_always_their_limits() -> None:
    assert compared_sizes(0, 4) == [0, 1, 2, 3, 4]
    sizes = compared_sizes(1, 1000)
    assert len(sizes) < 150 and sizes[-1] == 1000 and sizes[:20] == list(range(1, 21))
    assert compared_sizes(3, 3) == [3]


def test_a_candidate_pays_for_its_starts_and_is_late_until_they_end() -> None:
    one = Candidate("one", wanted=3, ready=1)
    for second in range(1, 41):
        one.advance(float(second), 1.0, start_s=20.0, late=lambda ready: float(max(0, 3 - ready)))
    assert one.ready == 3 and one.paid_s == 1 + 39 * 3 and one.late == 2 * 20
    one.wanted = 1
    one.advance(41.0, 1.0, start_s=20.0, late=lambda _: 0.0)
    assert one.ready == 1


def test_the_ledger_keeps_the_fixed_size_until_another_is_clearly_cheaper() -> None:
    ledger = Ledger(["fixed", "follows"], initial=4, margin=0.02)
    fixed, follows = ledger.candidates
    fixed.paid_s, follows.paid_s = 100.0, 99.0
    ledger.choose(1.0, exposure=lambda _: 0.0)
    assert ledger.followed is fixed
    follows.paid_s = 90.0
    ledger.choose(1.0, exposure=lambda _: 0.0)
    assert ledger.followed is follows and ledger.relative_cost(1.0) == pytest.approx(0.9)
    follows.late = 20.0
    ledger.choose(1.0, exposure=lambda _: 0.0)
    assert ledger.followed is fixed
    ledger.choose(0.1, exposure=lambda ready: 0.0)
    assert ledger.followed is follows


def test_it_follows_a_demand_that_stays_longer_than_a_start() -> None:
    steps = [(0.5, 900.0), (6.0, 900.0)] * 3
    requests = trace(*steps)
    result, scaler = play(requests)
    cheapest = min(
        one.replica_s
        for count in range(1, 13)
        if (
            one := simulation.simulate(requests, SPEED, simulation.fixed(count), initial_replicas=count, start_s=1.0)
        ).attainment
        >= result.attainment
    )
    assert result.replica_s < 0.97 * cheapest
    assert scaler.decision is not None and scaler.decision.followed != "fixed"
    assert "of the cost of the best fixed size" in scaler.decision.reason


def test_it_keeps_a_fixed_size_where_bursts_are_shorter_than_a_start() -> None:
    rng = random.Random(5)
    phases = [(rng.choice((0.1, 0.1, 8.0)), 30.0) for _ in range(120)]
    result, scaler = play(trace(*phases), start_s=120.0)
    assert scaler.decision is not None and scaler.decision.followed == "fixed"
    assert "the best fixed size so far" in scaler.decision.reason
    assert result.attainment > 0.93 and result.starts < 20


def test_it_stays_within_its_limits_and_stops_the_last_replica_only_if_allowed() -> None:
    for least, wanted in ((0, 0), (1, 1)):
        scaler = Autoscaler(ScalingPolicy(1.0, 4, 5.0, min_replicas=least, max_replicas=3))
        busy = [scaler.desired_replicas(snapshot(float(t), 20 * t, ready=3)) for t in range(60)]
        assert max(busy) == 3
        idle = [scaler.desired_replicas(snapshot(60.0 + t, 1180, ready=3)) for t in range(900)]
        assert idle[-1] == wanted
        assert scaler.desired_replicas(snapshot(960.0, 1181, ready=0, waiting=1)) >= 1


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (FleetSnapshot(900.0, 6, 0, 0, 0, 3600, at_metrics_s=880.0), "stale"),
        (FleetSnapshot(100.0, 6, 0, 0, 0, 3600), "clock went back"),
        (FleetSnapshot(5000.0, 6, 0, 0, 0, 3600), "without a snapshot"),
        (FleetSnapshot(600.0, 6, 0, 0, 0, 3), "began again"),
    ],
)
def test_it_holds_the_last_safe_size_when_the_counts_cannot_be_trusted(broken: FleetSnapshot, said: str) -> None:
    scaler = Autoscaler(ScalingPolicy(1.0, 4, 20.0, max_replicas=12))
    for second in range(600):
        size = scaler.desired_replicas(snapshot(float(second), second * 6, ready=6))
    decision = scaler.decide(broken)
    assert decision.replicas == size and not decision.trusted and said in decision.reason


def test_the_same_snapshots_give_the_same_decisions() -> None:
    requests = trace((1.0, 300.0), (6.0, 300.0))
    assert play(requests)[0].timeline == play(requests)[0].timeline


def test_faults_do_not_make_it_flap() -> None:
    requests = trace((3.0, 1200.0))
    faults = Faults(
        start_failures=0.5, crashes_s=(600.0,), metrics_stop_s=(300.0, 400.0), clock_jumps=((800.0, -60.0),)
    )
    result, _ = play(requests, faults=faults)
    assert result.starts - result.failed_starts < 20 and result.attainment > 0.9
    sizes = [one.desired for one in result.timeline if 301 <= one.at_s < 400]
    assert len(set(sizes[10:])) == 1 and math.isclose(sizes[-1], sizes[10])
