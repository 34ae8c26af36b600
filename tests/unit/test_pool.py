"""The picker's queue, routing and admission, with the time passed in."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerband.core.fleet import Fleet, Tenants
from powerband.core.prefix_hash import BLOCK_CHARS, block_hashes
from powerband.serve.router import admission, requests
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile
from powerband.serve.router.prefix_index import PrefixIndex, matched
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.scheduler import RequestOutcome, RequestScheduler
from powerband.serve.spec import ModelSpec


def pool(*, replicas: int = 2, max_in_flight: int = 2, **more: Any) -> EndpointPool:
    found = EndpointPool(RequestProfile(100.0, 25.0), rate_per_s=1.0, **more)
    for number in range(replicas):
        found.add(Endpoint(f"r{number}", f"h:{number}", max_in_flight))
    return found


def dispatch(found: EndpointPool, now_s: float) -> list[QueuedRequest]:
    return list(found.dispatch(now_s))


def replica_of(queued: QueuedRequest) -> str:
    assert queued.endpoint is not None
    return queued.endpoint.name


def test_no_replica_exceeds_its_max_in_flight() -> None:
    found = pool()
    for _ in range(6):
        found.enqueue(RequestProfile(10, 10), 0.0)
    first = dispatch(found, 0.0)
    assert len(first) == 4 and found.depth == 2 and found.running == 4
    assert [one.running for one in found.endpoints.values()] == [2, 2]
    found.finish(first[0], 1.0, output_tokens=10)
    assert len(dispatch(found, 1.0)) == 1 and found.depth == 1


def test_speed_is_learned_correctly_from_requests_that_finish_together() -> None:
    found = pool(replicas=1, max_in_flight=8)
    for wave in range(20):
        for _ in range(8):
            found.enqueue(RequestProfile(100.0, 25.0), float(wave))
        for one in dispatch(found, float(wave)):
            found.finish(one, wave + 1.0, output_tokens=25)
    assert found.seconds_per_unit == pytest.approx(1 / (8 * 200), rel=0.01)


def test_requests_are_served_by_priority_then_arrival() -> None:
    found = pool(replicas=1, max_in_flight=1)
    running = found.enqueue(RequestProfile(10, 10), 0.0)
    assert dispatch(found, 0.0) == [running]
    low, normal, other, high = (found.enqueue(RequestProfile(10, 10, priority=rank), 0.0) for rank in (2, 1, 1, 0))
    served = []
    for now_s in range(1, 5):
        found.finish(running, float(now_s), output_tokens=10)
        (running,) = dispatch(found, float(now_s))
        served.append(running)
    assert served == [high, normal, other, low]


def test_routing_balances_work_not_request_counts() -> None:
    found = pool(max_in_flight=8)
    found.enqueue(RequestProfile(4000, 500), 0.0)
    (large,) = dispatch(found, 0.0)
    for _ in range(3):
        found.enqueue(RequestProfile(20, 10), 0.0)
    assert {replica_of(one) for one in dispatch(found, 0.0)} == {"r0", "r1"} - {replica_of(large)}


def test_a_cached_prefix_attracts_requests_until_the_replica_is_busy() -> None:
    found = pool(max_in_flight=50)
    blocks = tuple(block_hashes("x" * 20 * BLOCK_CHARS))
    profile = RequestProfile(20 * BLOCK_CHARS / 4, 20, blocks=blocks)
    found.enqueue(profile, 0.0)
    (first,) = dispatch(found, 0.0)
    found.finish(first, 1.0, output_tokens=20)
    found.enqueue(profile, 1.0)
    (second,) = dispatch(found, 1.0)
    assert replica_of(second) == replica_of(first)
    for _ in range(30):
        found.enqueue(profile, 1.0)
    replicas = [replica_of(one) for one in dispatch(found, 1.0)]
    assert 5 <= replicas.count("r0") <= 25, "all requests of a hot prefix went to one replica"


def test_low_priority_leaves_slots_for_running_higher_priorities() -> None:
    found = pool(replicas=1, max_in_flight=8)
    for _ in range(4):
        found.enqueue(RequestProfile(10, 10, priority=0), 0.0)
    for _ in range(8):
        found.enqueue(RequestProfile(10, 10, priority=2), 0.0)
    assert [one.profile.priority for one in dispatch(found, 0.0)] == [0, 0, 0, 0, 2, 2]
    found.enqueue(RequestProfile(10, 10, priority=0), 0.0)
    assert [one.profile.priority for one in dispatch(found, 0.0)] == [0]


def test_round_robin_alternates_between_replicas() -> None:
    found = pool(max_in_flight=50, routing="round-robin")
    for _ in range(10):
        found.enqueue(RequestProfile(10, 10), 0.0)
    assert [replica_of(one) for one in dispatch(found, 0.0)] == ["r0", "r1"] * 5


def test_requests_for_an_adapter_go_where_it_is_loaded() -> None:
    found = pool(max_in_flight=50)
    found.enqueue(RequestProfile(10, 10, adapter="a"), 0.0)
    (first,) = dispatch(found, 0.0)
    found.finish(first, 1.0, output_tokens=10)
    for _ in range(3):
        found.enqueue(RequestProfile(10, 10, adapter="a"), 1.0)
    assert {replica_of(one) for one in dispatch(found, 1.0)} == {replica_of(first)}


def test_expired_and_cancelled_requests_are_not_dispatched() -> None:
    found = pool(replicas=1, max_in_flight=1)
    running = found.enqueue(RequestProfile(10, 10), 0.0)
    dispatch(found, 0.0)
    expired, cancelled, last = (
        found.enqueue(RequestProfile(10, 10, queue_timeout_s=wait), 0.0) for wait in (1.0, 9.0, math.inf)
    )
    found.cancel(cancelled)
    assert list(found.pop_expired(1.5)) == [expired] and found.depth == 1
    found.finish(running, 2.0, output_tokens=10)
    assert dispatch(found, 2.0) == [last]
    assert not list(found.pop_expired(100.0))


def test_predicted_wait_counts_the_work_ahead() -> None:
    found = pool(replicas=1, max_in_flight=1)
    assert found.predicted_wait_s(1, 0.0) == 0.0
    found.enqueue(RequestProfile(100, 25), 0.0)
    dispatch(found, 0.0)
    for _ in range(4):
        found.enqueue(RequestProfile(100, 25, priority=1), 0.0)
    assert found.predicted_wait_s(0, 0.0) == pytest.approx(0.5)
    assert found.predicted_wait_s(1, 0.0) == pytest.approx(4.5)
    found.endpoints["r0"].ready = False
    assert found.predicted_wait_s(1, 0.0) == math.inf


def test_a_canary_receives_its_weight() -> None:
    found = pool(replicas=1, max_in_flight=1000)
    found.add(Endpoint("new", "h:9", 1000, canary=True))
    found.canary_weight = 0.2
    for _ in range(100):
        found.enqueue(RequestProfile(10, 10), 0.0)
    assert sum(replica_of(one) == "new" for one in dispatch(found, 0.0)) == 20


@given(
    st.lists(
        st.tuples(st.sampled_from(["enqueue", "finish", "cancel", "expire", "dispatch"]), st.integers(0, 9)),
        max_size=80,
    )
)
def test_no_request_is_lost_in_any_sequence_of_events(steps: list[tuple[str, int]]) -> None:
    found, now_s = pool(), 0.0
    waiting: list[QueuedRequest] = []
    running: list[QueuedRequest] = []
    for event, number in steps:
        now_s += 0.5
        if event == "enqueue":
            waiting.append(
                found.enqueue(
                    RequestProfile(10 * number + 1, 5, priority=number % 3, queue_timeout_s=number + 1.0), now_s
                )
            )
        elif event == "finish" and running:
            found.finish(running.pop(number % len(running)), now_s, output_tokens=number)
        elif event == "cancel" and waiting:
            found.cancel(waiting.pop(number % len(waiting)))
        elif event == "expire":
            for one in found.pop_expired(now_s):
                waiting.remove(one)
        for one in found.dispatch(now_s):
            waiting.remove(one)
            running.append(one)
        assert found.depth == len(waiting)
        assert found.running == len(running) <= 4
        assert all(0 <= one.running <= 2 for one in found.endpoints.values())
        assert found.seconds_per_unit > 0


def test_prefix_index_is_bounded() -> None:
    index = PrefixIndex[str](max_blocks=100)
    for number in range(500):
        index.learn([number], f"r{number % 2}")
    assert len(index) == 100
    first, second = block_hashes("a" * 3 * BLOCK_CHARS), block_hashes("a" * 2 * BLOCK_CHARS + "b" * BLOCK_CHARS)
    index.learn(first, "r1")
    index.learn(first[:1], "r2")
    assert [matched(index.holders(second), name) for name in ("r1", "r2", "r3")] == [2, 1, 0]


def test_a_replica_that_comes_back_has_lost_its_prefixes() -> None:
    found, blocks = pool(replicas=2), tuple(block_hashes("a" * 9 * BLOCK_CHARS))
    found.enqueue(RequestProfile(900.0, 10.0, blocks=blocks), 0.0)
    first = next(iter(found.dispatch(0.0))).endpoint
    assert first and matched(found.prefixes.holders(blocks), first) == 9
    found.add(Endpoint(first.name, first.address, 2))
    assert matched(found.prefixes.holders(blocks), found.endpoints[first.name]) == 0


def test_a_large_pool_is_sampled_and_loses_little() -> None:
    found = EndpointPool(RequestProfile(100.0, 10.0), rate_per_s=1.0)
    for number in range(500):
        found.add(Endpoint(f"r{number}", f"h:{number}", 4))
    blocks = tuple(block_hashes("a" * 40 * BLOCK_CHARS))
    for _ in range(1000):
        found.enqueue(RequestProfile(100.0, 10.0), 0.0)
    assert len(list(found.dispatch(0.0))) == 1000
    assert max(one.running for one in found.endpoints.values()) <= 3, "as evenly as of all: 2 each, or one more"
    holders = set()
    for number in range(20):  # one prefix stays on the replica that has it
        found.enqueue(RequestProfile(4000.0, 10.0, blocks=blocks), float(number))
        (one,) = found.dispatch(float(number))
        assert one.endpoint
        holders.add(one.endpoint.name)
        found.finish(one, number + 0.1)
    assert len(holders) == 1
    for _ in range(1000):
        found.enqueue(RequestProfile(100.0, 10.0), 0.0)
    assert len(list(found.dispatch(20.0))) == 1000, "the last free slots are found as well"
    assert found.predicted_wait_s(1, 20.0) > 0


def model_spec(name: str = "m", **more: Any) -> ModelSpec:
    usual = {"prompt_tokens": 100.0, "output_tokens": 25.0, "rate_per_s": 1.0, "queue_timeout_s": 1.0}
    return ModelSpec(name, data={}, recipe="r", replicas=1, in_flight=1, **{**usual, **more})


def endpoint(name: str, max_in_flight: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "address": f"{name}:1",
        "max_in_flight": max_in_flight,
        "ready": True,
        "recipe": "r",
        "canary": False,
    }


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def test_an_alias_is_replaced_by_the_model_name_and_an_adapter_is_not() -> None:
    scheduler = RequestScheduler({"m": model_spec(aliases=("gpt",), adapters=("fine",))})
    scheduler.update_endpoints({"m": [endpoint("a", 9), endpoint("b", 9)]}, {})
    plain, alias, adapter = [
        await scheduler.pick(body(model=name), request_id=name, tenant="anybody", headers={})
        for name in ("m", "gpt", "fine")
    ]
    assert plain.body is None and adapter.body is None
    assert alias.body is not None and json.loads(alias.body)["model"] == "m"
    assert sorted(plain.addresses) == ["a:1", "b:1"]
    assert plain.recipe == "r"
    with pytest.raises(RequestRejected) as rejected:
        await scheduler.pick(body(model="other"), request_id="other", tenant="anybody", headers={})
    assert rejected.value.status == 404


async def test_usage_and_limits_of_a_tenant() -> None:
    key, digest = admission.new_key()
    known = Tenants.model_validate({"tenants": {"me": {"key_sha256": digest, "in_flight": 1, "models": ["m"]}}})
    scheduler = RequestScheduler({"m": model_spec(usd_per_1m_tokens=2.0), "n": model_spec("n")}, known)
    scheduler.update_endpoints({"m": [endpoint("a", 9)], "n": [endpoint("b")]}, {})
    assert scheduler.admission.authenticate(f"Bearer {key}") == "me"
    assert list(scheduler.model_names("me")) == ["m"]
    await scheduler.pick(body(), request_id="first", tenant="me", headers={})
    for wanted, status in (("m", 429), ("n", 403)):
        with pytest.raises(RequestRejected) as rejected:
            await scheduler.pick(body(model=wanted), request_id=wanted, tenant="me", headers={})
        assert rejected.value.status == status
    scheduler.finish("first", RequestOutcome(200, output_tokens=500_000, prompt_tokens=1_000_000))
    usage = scheduler.admission.usage_of("me")
    assert (usage.usd, usage.prompt_tokens, usage.running, usage.rejected) == (3.0, 1_000_000, 0, 2)
    await scheduler.pick(body(), request_id="failed", tenant="me", headers={})
    scheduler.finish("failed", RequestOutcome(502, prompt_tokens=1_000_000))
    assert usage.usd == 3.0  # no answer, no cost


async def test_slots_are_freed_when_envoy_exits() -> None:
    scheduler = RequestScheduler({"m": model_spec(queue_timeout_s=50.0)})
    scheduler.update_endpoints({"m": [endpoint("a")]}, {})
    await scheduler.pick(body(), request_id="first", tenant="anybody", headers={})
    second = asyncio.create_task(scheduler.pick(body(), request_id="second", tenant="anybody", headers={}))
    await asyncio.sleep(0)
    scheduler.fail_in_flight()
    assert (await second).replica == "a"
    assert scheduler.pools["m"].running == 1


async def test_a_cancelled_request_holds_no_slot() -> None:
    scheduler = RequestScheduler({"m": model_spec(queue_timeout_s=50.0)})
    scheduler.update_endpoints({"m": [endpoint("a")]}, {})
    await scheduler.pick(body(), request_id="first", tenant="anybody", headers={})
    second = asyncio.create_task(scheduler.pick(body(), request_id="second", tenant="anybody", headers={}))
    await asyncio.sleep(0)
    for _ in range(2):  # the access log reports its end, and its ext_proc stream ends too
        scheduler.finish("second", RequestOutcome(status=0))
    with pytest.raises(asyncio.CancelledError):
        await second
    pool, usage = scheduler.pools["m"], scheduler.admission.usage_of("anybody")
    assert (pool.running, pool.depth, usage.running) == (1, 0, 1)
    scheduler.finish("first", RequestOutcome(200, output_tokens=3))
    assert (pool.running, usage.running, scheduler.contexts) == (0, 0, {})


async def test_a_rejection_states_the_predicted_wait_and_the_limit() -> None:
    scheduler = RequestScheduler({"m": model_spec(queue_timeout_s=0.25)})
    scheduler.update_endpoints({"m": [endpoint("a")]}, {})
    await scheduler.pick(body(), request_id="first", tenant="anybody", headers={})
    with pytest.raises(RequestRejected) as rejected:
        await scheduler.pick(body(), request_id="second", tenant="anybody", headers={})
    assert rejected.value.message == "no capacity before the deadline (predicted wait 0.48 s, limit 0.25 s)"
    assert (rejected.value.status, rejected.value.retry_after_s) == (429, 1.0)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_body_is_parsed_or_rejected(data: bytes) -> None:
    try:
        requests.read(data)
    except RequestRejected as error:
        assert json.loads(error.body)["error"]["code"]


def test_an_inconsistent_fleet_is_invalid() -> None:
    for models in (
        {"a": {"recipe": "r", "fallback": "b"}},
        {"a": {"recipe": "r", "fallback": "a"}},
        {"a": {"recipe": "r", "aliases": ["b"]}, "b": {"recipe": "r"}},
    ):
        with pytest.raises(ValueError):
            Fleet.model_validate({"models": models})


def test_a_request_that_may_have_ended_an_engine_runs_alone() -> None:
    found = pool(replicas=8, max_in_flight=2)
    for _ in range(16):
        found.enqueue(RequestProfile(10, 10), 0.0)
    running = dispatch(found, 0.0)
    alone = [found.enqueue(RequestProfile(10, 10), 0.0, exclusive=True) for _ in range(3)]
    assert dispatch(found, 0.0) == [] and found.depth == 3
    reserved = [one for one in found.endpoints.values() if one.reserved_for]
    assert len(reserved) == 2  # a quarter of the replicas
    waiting = found.enqueue(RequestProfile(10, 10), 0.0)
    for one in running:
        if one.endpoint in reserved:
            found.finish(one, 1.0, output_tokens=10)
    assert dispatch(found, 1.0) == alone[:2] and {one.running for one in reserved} == {1}
    assert dispatch(found, 1.0) == [] and not waiting.endpoint
    found.finish(alone[0], 2.0, output_tokens=10)
    later = dispatch(found, 2.0)
    assert (alone[2] in later and waiting not in later) or waiting.endpoint is not alone[2].endpoint
    found.cancel(waiting)
    found.finish(alone[1], 3.0)
    assert not [one for one in found.endpoints.values() if one.reserved_for in alone[:2]]


def test_a_cancelled_request_frees_the_replica_that_was_reserved_for_it() -> None:
    found = pool(replicas=1, max_in_flight=1)
    found.enqueue(RequestProfile(10, 10), 0.0)
    (first,) = dispatch(found, 0.0)
    alone, other = (
        found.enqueue(RequestProfile(10, 10), 0.0, exclusive=True),
        found.enqueue(RequestProfile(10, 10), 0.0),
    )
    assert dispatch(found, 0.0) == []
    found.cancel(alone)
    found.finish(first, 1.0)
    assert dispatch(found, 1.0) == [other]


def failed_scheduler() -> RequestScheduler:
    found = RequestScheduler({"m": model_spec()})
    found.update_endpoints({"m": [endpoint("a", 2), endpoint("b", 2)]}, {})
    return found


async def test_a_request_is_rejected_after_two_dead_engines_and_so_is_its_repetition() -> None:
    found, body = failed_scheduler(), json.dumps({"model": "m", "prompt": "deadly"}).encode()
    headers = {":path": "/v1/completions"}
    first = await found.pick(body, request_id="1", tenant="t", headers=headers)
    earlier = found.retry("1", "/died")
    assert earlier is not None and (earlier.deaths, earlier.path, earlier.tenant) == (1, "/v1/completions", "t")
    assert found.retry("1", "/died") is None and found.retry("unknown", "/died") is None
    found.finish("1", RequestOutcome(status=307, retried=True))  # the access log may come later
    second = await found.pick(body, request_id="2", tenant="t", headers=headers, earlier=earlier)
    assert second.replica != first.replica
    found.finish("2", RequestOutcome(status=307, retried=True))  # or earlier
    again = found.retry("2", "/died")
    assert again is not None and again.deaths == 2
    for name, earlier_ in (("3", again), ("4", None)):
        with pytest.raises(RequestRejected) as error:
            await found.pick(body, request_id=name, tenant="t", headers=headers, earlier=earlier_)
        assert error.value.code == ("engine_died" if earlier_ else "quarantined")
    other = json.dumps({"model": "m", "prompt": "harmless"}).encode()
    task = asyncio.create_task(found.pick(other, request_id="5", tenant="t", headers=headers))
    await asyncio.sleep(0)
    assert not task.done()  # both replicas failed just now
    found.clock = lambda: 1e9
    found.expire()
    assert (await task).replica and found.admission.usage_of("t").running == 1
    assert not found.pools["m"].depth
    found.finish("5", RequestOutcome(status=200, output_tokens=5))
    assert found.admission.usage_of("t").running == 0


async def test_an_unavailable_replica_is_no_dead_engine() -> None:
    found, body = failed_scheduler(), json.dumps({"model": "m", "prompt": "x"}).encode()
    earlier = None
    for number in range(6):
        decision = await found.pick(body, request_id=str(number), tenant="t", headers={}, earlier=earlier)
        found.pools["m"].endpoints[decision.replica].suspended_until_s = 0.0
        earlier = found.retry(str(number), "/unavailable")
        for one in found.pools["m"].endpoints.values():
            one.suspended_until_s = 0.0
        assert earlier is not None and earlier.deaths == 0


async def test_a_replica_that_came_back_is_used_at_once() -> None:
    found = failed_scheduler()
    rows = [endpoint("a", 2), endpoint("b", 2)]
    for one in found.pools["m"].endpoints.values():
        one.suspended_until_s = 1e12
    found.update_endpoints({"m": [rows[0] | {"ready": False}, rows[1]]}, {})
    found.update_endpoints({"m": rows}, {})
    assert [one.is_able(0.0) for one in found.pools["m"].endpoints.values()] == [True, False]
