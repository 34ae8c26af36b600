"""The autoscaler, and its simulator."""

from __future__ import annotations

import random

from powerband.serve.control import autoscaler_sim
from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot, ScalingPolicy
from powerband.serve.control.autoscaler_sim import Arrival, ReplicaSpeed

SPEED = ReplicaSpeed(slots=4, prefill_s_per_token=0.001, decode_s_per_token=0.01, start_s=10.0, ttft_s=2.0)


def trace(rate: float, seconds: float, start_s: float = 0.0, seed: int = 0) -> list[Arrival]:
    rng, now, found = random.Random(seed), start_s, []
    while (now := now + rng.expovariate(rate)) < start_s + seconds:
        found.append(Arrival(now, 100, 90))
    return found


def snapshot(at_s: float, arrived: int, **more: int) -> FleetSnapshot:
    return FleetSnapshot(at_s, **{"ready": 1, "starting": 0, "waiting": 0, "running": 0, "arrived": arrived, **more})


def test_it_scales_up_at_once_and_down_after_a_delay() -> None:
    scaler = Autoscaler(ScalingPolicy(rate_per_s=2.0, slots=4, start_s=5.0, min_replicas=1, max_replicas=20))
    up = [scaler.desired_replicas(snapshot(float(t), 10 * t)) for t in range(60)]
    assert 5 <= max(up) <= 12 and up[-1] >= 5
    later = [scaler.desired_replicas(snapshot(60.0 + t, 600)) for t in range(200)]
    assert later[20] >= 5 and later[-1] == 1


def test_it_stays_within_its_limits_and_scales_to_zero_if_allowed() -> None:
    scaler = Autoscaler(ScalingPolicy(rate_per_s=1.0, slots=4, start_s=5.0, min_replicas=0, max_replicas=3))
    assert max(scaler.desired_replicas(snapshot(float(t), 100 * t)) for t in range(30)) == 3
    assert [scaler.desired_replicas(snapshot(30.0 + t, 3000)) for t in range(120)][-1] == 0
    assert scaler.desired_replicas(snapshot(151.0, 3001, waiting=1)) >= 1


def test_the_simulator_serves_every_request_and_counts_every_replica_second() -> None:
    requests = trace(2.0, 300)
    result = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(3), initial_replicas=3)
    assert result.attainment == 1.0 and result.max_replicas == 3 and result.starts == 0
    assert abs(result.replica_s - 3 * requests[-1].at_s) < 3 * 5
    assert result.replica_s > autoscaler_sim.oracle(requests, SPEED)


def test_too_few_replicas_miss_the_limit_and_scaling_up_helps_after_the_start_time() -> None:
    requests = trace(8.0, 120)
    few = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(1), initial_replicas=1)
    enough = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), initial_replicas=4)
    grown = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), initial_replicas=1)
    assert few.attainment < grown.attainment < enough.attainment == 1.0


def test_scaling_down_costs_less_and_still_attains() -> None:
    requests = [*trace(8.0, 60), *trace(0.2, 900, start_s=60.0)]
    policy = ScalingPolicy(SPEED.rate_per_s(requests), SPEED.slots, SPEED.start_s)
    result = autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.ours(policy), initial_replicas=3)
    assert result.attainment > 0.9
    assert (
        result.replica_s
        < 0.7 * autoscaler_sim.simulate(requests, SPEED, autoscaler_sim.fixed(4), initial_replicas=4).replica_s
    )
