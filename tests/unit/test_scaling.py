"""How many replicas: a pure function, and the simulator that it is played in."""

from __future__ import annotations

import random

from powerband.serve.control import autoscaler_sim
from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot, ScalingPolicy
from powerband.serve.control.autoscaler_sim import Arrival, ReplicaSpeed

SPEED = ReplicaSpeed(places=4, read_s=0.001, write_s=0.01, start_s=10.0, ttft_s=2.0)


def trace(rate: float, seconds: float, start_s: float = 0.0, seed: int = 0) -> list[Arrival]:
    rng, now, found = random.Random(seed), start_s, []
    while (now := now + rng.expovariate(rate)) < start_s + seconds:
        found.append(Arrival(now, 100, 90))
    return found


def seen(at_s: float, arrived: int, **more: int) -> FleetSnapshot:
    return FleetSnapshot(at_s, **{"ready": 1, "starting": 0, "waiting": 0, "running": 0, "arrived": arrived, **more})


def test_it_follows_the_rate_up_at_once_and_down_after_a_while() -> None:
    scaler = Autoscaler(ScalingPolicy(rate_per_s=2.0, places=4, start_s=5.0, least=1, most=20))
    up = [scaler.wanted(seen(float(t), 10 * t)) for t in range(60)]
    assert 5 <= max(up) <= 12 and up[-1] >= 5
    later = [scaler.wanted(seen(60.0 + t, 600)) for t in range(200)]
    assert later[20] >= 5 and later[-1] == 1


def test_it_stays_within_its_bounds_and_goes_to_zero_when_asked() -> None:
    scaler = Autoscaler(ScalingPolicy(rate_per_s=1.0, places=4, start_s=5.0, least=0, most=3))
    assert max(scaler.wanted(seen(float(t), 100 * t)) for t in range(30)) == 3
    assert [scaler.wanted(seen(30.0 + t, 3000)) for t in range(120)][-1] == 0
    assert scaler.wanted(seen(151.0, 3001, waiting=1)) >= 1


def test_the_simulator_answers_everyone_and_pays_for_every_second() -> None:
    requests = trace(2.0, 300)
    played = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(3), begin=3)
    assert played.attainment == 1.0 and played.most == 3 and played.starts == 0
    assert abs(played.replica_s - 3 * requests[-1].at_s) < 3 * 5
    assert played.replica_s > autoscaler_sim.oracle(requests, SPEED)


def test_too_few_replicas_are_late_and_a_late_start_helps_late() -> None:
    requests = trace(8.0, 120)
    few = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(1), begin=1)
    enough = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), begin=4)
    grown = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), begin=1)
    assert few.attainment < grown.attainment < enough.attainment == 1.0


def test_scaling_in_never_drops_an_answer() -> None:
    requests = [*trace(8.0, 60), *trace(0.2, 900, start_s=60.0)]
    policy = ScalingPolicy(SPEED.rate_per_s(requests), SPEED.places, SPEED.start_s)
    played = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.ours(policy), begin=3)
    assert played.attainment > 0.9
    assert played.replica_s < 0.7 * autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), begin=4).replica_s
