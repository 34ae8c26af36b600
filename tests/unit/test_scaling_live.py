"""What the picker counts for the autoscaler, and what the fleet tells of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from powerband.serve.router.pool import Endpoint
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.scheduler import RequestScheduler
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.spec import ModelSpec

MODEL = ModelSpec(name="m", data={}, recipe="r", replicas=1, in_flight=1, queue_timeout_s=1.0, rate_per_s=0.1)
SMALL = dataclasses.replace(MODEL, name="s", rate_per_s=10.0)


async def ask(scheduler: RequestScheduler, number: int) -> str:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    return (await scheduler.pick(body, request_id=str(number), tenant="anonymous", headers={})).replica


def scheduler_of(*models: ModelSpec) -> RequestScheduler:
    found = RequestScheduler({one.name: one for one in models}, clock=lambda: 100.0)
    for name, pool in found.pools.items():
        pool.add(Endpoint(f"{name}-1", f"{name}:1", max_in_flight=1))
    return found


async def test_requests_that_are_rejected_at_once_count_as_demand() -> None:
    scheduler = scheduler_of(MODEL)
    assert await ask(scheduler, 1) == "m-1"
    for number in (2, 3):
        with pytest.raises(RequestRejected, match="no capacity"):
            await ask(scheduler, number)
    report = Telemetry().summary(scheduler)["pools"]["m"]
    assert (report["arrived"], report["turned_away"], report["expired"], report["late"]) == (1, 2, 0, 0)


async def test_requests_that_the_fallback_serves_count_as_demand_of_the_model_that_was_asked() -> None:
    scheduler = scheduler_of(dataclasses.replace(MODEL, fallback="s"), SMALL)
    assert [await ask(scheduler, number) for number in (1, 2)] == ["m-1", "s-1"]
    pools = Telemetry().summary(scheduler)["pools"]
    assert pools["m"]["turned_away"] == 1 and pools["s"]["turned_away"] == 0 and pools["s"]["arrived"] == 1


async def test_requests_that_wait_too_long_are_counted() -> None:
    now_s = [100.0]
    scheduler = scheduler_of(dataclasses.replace(MODEL, rate_per_s=10.0))
    scheduler.clock = lambda: now_s[0]
    await ask(scheduler, 1)
    waiting = asyncio.create_task(ask(scheduler, 2))
    await asyncio.sleep(0)
    now_s[0] += 2.0
    scheduler.expire()
    with pytest.raises(RequestRejected):
        await waiting
    assert scheduler.pools["m"].expired == 1 and scheduler.pools["m"].arrived == 2


def test_the_metrics_tell_what_the_autoscaler_wants() -> None:
    telemetry = Telemetry()
    decision = {"replicas": 8, "fixed": 12, "relative_cost": 0.71, "trusted": True, "followed": "peak", "reason": ""}
    telemetry.replica_status = {"scaling": {"m": decision}}
    text = telemetry.exposition(scheduler_of(MODEL)).decode()
    for line in ('replicas{model="m"} 8.0', 'fixed{model="m"} 12.0', 'relative_cost{model="m"} 0.71'):
        assert f"powerband_autoscaler_{line}" in text
    assert 'powerband_autoscaler_trusted{model="m"} 1.0' in text
    assert 'powerband_autoscaler_info{follows="peak",model="m"} 1.0' in text


def test_a_fleet_begins_with_the_initial_replicas_within_its_limits() -> None:
    def first(initial: int | None, most: int | None = 6) -> int:
        return dataclasses.replace(MODEL, initial_replicas=initial, max_replicas=most).first_replicas

    assert [first(None), first(4), first(9), first(0), first(4, None)] == [1, 4, 6, 1, 1]
    policy = dataclasses.replace(MODEL, max_replicas=6, attainment=0.9).scaling_policy()
    assert (policy.min_replicas, policy.max_replicas, policy.attainment, policy.queue_timeout_s) == (1, 6, 0.9, 1.0)
