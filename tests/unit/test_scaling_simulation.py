"""The simulator of autoscalers, and the bounds with hindsight."""

from __future__ import annotations

import itertools
import random

from powerband.serve.autoscaling import bounds, simulation
from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed, SimulatedReplica
from powerband.serve.autoscaling.simulation import Faults, SimulatedModel
from powerband.serve.autoscaling.snapshot import FleetSnapshot

SPEED = ReplicaSpeed(slots=4, step_s=0.02, prompt_token_s=0.0005, sequence_s=0.0025)


def trace(rate: float, seconds: float, start_s: float = 0.0, seed: int = 0) -> list[Arrival]:
    rng, now, found = random.Random(seed), start_s, []
    while (now := now + rng.expovariate(rate)) < start_s + seconds:
        found.append(Arrival(now, 200, 100))
    return found


def test_a_request_alone_takes_its_prefill_and_its_decode_steps() -> None:
    replica = SimulatedReplica(SPEED, began_s=0.0, state="ready")
    replica.dispatch(10.0, 7, Arrival(10.0, 200, 100))
    assert replica.next_s == 10.0 + 200 * 0.0005 + 0.02
    assert replica.advance(replica.next_s) == (7, [])
    assert abs(replica.next_s - (10.12 + 99 * 0.0225)) < 1e-9
    assert replica.advance(replica.next_s) == (None, [7]) and replica.running == 0


def test_prefill_delays_the_sequences_that_decode_and_a_larger_batch_is_slower() -> None:
    ends = {}
    for others in (0, 3):
        replica = SimulatedReplica(SPEED, began_s=0.0, state="ready")
        for number in range(1 + others):
            replica.dispatch(0.0, number, Arrival(0.0, 200, 100))
        while replica.running:
            now_s = replica.next_s
            _, finished = replica.advance(now_s)
            ends.update({(others, number): now_s for number in finished})
    assert ends[3, 0] > ends[0, 0] + 3 * 0.1 + 90 * 3 * 0.0025


def test_the_saturated_rate_is_the_throughput_of_a_replica_that_is_never_idle() -> None:
    requests = [Arrival(0.0, 200, 100)] * 400
    patient = ReplicaSpeed(4, SPEED.step_s, SPEED.prompt_token_s, SPEED.sequence_s, queue_timeout_s=1e9)
    replica, queue, now_s = SimulatedReplica(patient, began_s=0.0, state="ready"), iter(enumerate(requests)), 0.0
    for number, request in itertools.islice(queue, 4):
        replica.dispatch(0.0, number, request)
    while replica.running:
        now_s = replica.next_s
        for _ in replica.advance(now_s)[1]:
            if more := next(queue, None):
                replica.dispatch(now_s, *more)
    assert abs(400 / now_s / patient.saturated_rate_per_s(requests) - 1) < 0.05


def test_every_request_is_served_or_rejected_and_every_replica_second_is_paid() -> None:
    requests = trace(2.0, 300)
    enough = simulation.simulate(requests, SPEED, simulation.fixed(4), initial_replicas=4, start_s=5.0)
    assert enough.attainment == 1.0 and enough.rejected == 0 and enough.starts == 0
    assert abs(enough.replica_s - 4 * requests[-1].at_s) < 1e-6
    few = simulation.simulate(requests, SPEED, simulation.fixed(1), initial_replicas=1, start_s=5.0)
    assert few.rejected > 0 and few.attained + few.rejected <= few.requests
    assert 0.4 < few.attainment < 0.9


def test_replicas_that_start_are_paid_for_and_serve_only_after_their_start() -> None:
    requests = trace(6.0, 200)
    grown = simulation.simulate(requests, SPEED, simulation.fixed(8), initial_replicas=1, start_s=60.0)
    assert grown.starts == 7 and abs(grown.replica_s - 8 * requests[-1].at_s) < 1e-6
    late = [one.at_s for one, missed in zip(requests, grown.late, strict=True) if missed]
    assert late and max(late) < 62.0


def test_models_share_devices_and_overflow_to_the_fallback() -> None:
    busy = SimulatedModel(trace(4.0, 120), SPEED, simulation.fixed(3), 1, start_s=5.0, fallback="small")
    small = SimulatedModel(trace(0.2, 120, seed=1), SPEED, simulation.fixed(1), 1, start_s=5.0)
    results = simulation.simulate_fleet({"large": busy, "small": small}, devices=3)
    assert results["large"].max_replicas == 2 and results["large"].overflowed > 0
    assert results["small"].requests == len(small.trace)
    roomy = simulation.simulate_fleet({"large": busy, "small": small}, devices=4)
    assert roomy["large"].max_replicas == 3 and roomy["large"].overflowed < results["large"].overflowed


def test_faults_happen() -> None:
    requests = trace(3.0, 300)
    faults = Faults(start_spread=0.3, start_failures=0.5, crashes_s=(100.0,), seed=1)
    hit = simulation.simulate(requests, SPEED, simulation.fixed(4), initial_replicas=2, start_s=20.0, faults=faults)
    calm = simulation.simulate(requests, SPEED, simulation.fixed(4), initial_replicas=2, start_s=20.0)
    assert hit.failed_starts > 0 and hit.starts > calm.starts and hit.attained < calm.attained
    seen: list[tuple[float, int]] = []

    def watch(snapshot: FleetSnapshot) -> int:
        seen.append((snapshot.metrics_s, snapshot.arrived))
        return 2

    stopped = Faults(metrics_stop_s=(50.0, 100.0), clock_jumps=((200.0, -60.0),))
    simulation.simulate(requests, SPEED, watch, initial_replicas=2, start_s=20.0, faults=stopped)
    assert len(set(seen[50:100])) == 1 and seen[150] != seen[149]
    assert any(later[0] < earlier[0] for earlier, later in itertools.pairwise(seen))


def test_the_cheapest_schedule_follows_steps_and_starts_ahead_of_them() -> None:
    late = [[10, 0, 0, 0]] * 10 + [[30, 20, 10, 0]] * 10 + [[10, 0, 0, 0]] * 10
    found = bounds.cheapest_schedule(late, 10.0, slot_s=10.0, initial=1, start_s=20.0)
    assert found == [1] * 10 + [3] * 10 + [1] * 10
    assert bounds.cheapest_schedule(late, 0.1, slot_s=10.0, initial=1, start_s=20.0) == [0] * 30
    dear = bounds.cheapest_schedule(late, 10.0, slot_s=10.0, initial=1, start_s=1e5)
    assert max(dear) == 1


def test_the_bounds_attain_what_is_asked_and_the_clairvoyant_is_the_cheapest() -> None:
    requests = [*trace(1.0, 600), *trace(8.0, 300, 600.0), *trace(1.0, 600, 900.0)]
    hindsight = bounds.Hindsight(requests, SPEED)
    fixed = hindsight.best_fixed(0.97)
    assert fixed.result.attainment >= 0.97
    assert hindsight.fixed(fixed.result.max_replicas - 1).attainment < 0.97
    following = hindsight.best_threshold(0.97, initial=1, start_s=1.0, most=20)
    known = hindsight.clairvoyant(0.97, initial=1, start_s=1.0)
    assert following is not None and known is not None
    assert known.result.replica_s < following.result.replica_s < fixed.result.replica_s
    peak = hindsight.peak_sized()
    assert peak.result.replica_s >= fixed.result.replica_s
