"""The pool's arithmetic: outstanding work, learned speed, predicted waits, and the order of replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest

from powerband.core.prefix_hash import BLOCK_CHARS, block_hashes
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile

TYPICAL = RequestProfile(100.0, 25.0)  # 100 + 4 * 25 = 200 units of work


def pool(replicas: int = 2, max_in_flight: int = 2, **more: Any) -> EndpointPool:
    found = EndpointPool(TYPICAL, rate_per_s=1.0, **more)  # 0.005 s per unit
    for number in range(replicas):
        found.add(Endpoint(f"r{number}", f"h:{number}", max_in_flight))
    return found


def start(found: EndpointPool, profile: RequestProfile = TYPICAL, now_s: float = 0.0) -> QueuedRequest:
    found.enqueue(profile, now_s)
    (one,) = found.dispatch(now_s)
    return one


def name_of(one: QueuedRequest) -> str:
    assert one.endpoint
    return one.endpoint.name


def test_outstanding_work_is_done_at_the_learned_speed() -> None:
    one = Endpoint("a", "h:1", 4)
    one.add_work(100.0, 0.0, 0.5)
    assert one.remaining_work(10.0, 0.5) == 80.0 and one.remaining_work(100.0, 0.5) == 0.0
    one.add_work(50.0, 10.0, 0.5)
    assert one.remaining_work(10.0, 0.5) == 130.0
    one.add_work(-500.0, 10.0, 0.5)
    assert one.remaining_work(10.0, 0.5) == 0.0


def test_time_in_flight_is_the_integral_of_the_running_requests() -> None:
    one = Endpoint("a", "h:1", 4)
    one.change_running(1, 2.0)
    one.change_running(1, 3.0)
    one.change_running(-1, 7.0)
    assert (one.running, one.in_flight_s) == (1, 1 * 1.0 + 2 * 4.0)
    one.change_running(-1, 8.0)
    assert (one.running, one.in_flight_s) == (0, 10.0)


def test_a_replica_is_able_once_its_suspension_ends() -> None:
    one = Endpoint("a", "h:1", 1, suspended_until_s=5.0)
    assert not one.is_able(4.9) and one.is_able(5.0)
    one.ready = False
    assert not one.is_able(9.0)


def test_the_estimated_work_of_a_request() -> None:
    assert TYPICAL.work_estimate == 200.0
    assert EndpointPool(TYPICAL).seconds_per_unit == 0.001
    assert EndpointPool(TYPICAL, rate_per_s=2.0).seconds_per_unit == 0.0025


@pytest.mark.parametrize(("output", "work"), [(25, 200.0), (50, 300.0), (0, 100.0)])
def test_the_speed_is_a_moving_average_over_finished_requests(output: int, work: float) -> None:
    found = pool(1)
    one = start(found)
    found.finish(one, 2.0, output_tokens=output)
    assert found.seconds_per_unit == pytest.approx(0.005 + 0.1 * (2.0 / work - 0.005))


def test_the_speed_counts_a_requests_share_of_its_replica() -> None:
    found = pool(1)
    first, second = start(found), start(found)
    found.finish(first, 2.0)
    before = found.seconds_per_unit
    found.finish(second, 3.0, output_tokens=25)  # 3 s, of which 2 s beside another: mean concurrency 5 / 3
    assert found.seconds_per_unit == pytest.approx(before + 0.1 * (3.0 * 3.0 / 5.0 / 200.0 - before))


def test_the_speed_is_not_learned_from_failures() -> None:
    found = pool(1)
    found.finish(start(found), 2.0)
    found.finish(start(found, now_s=2.0), 2.0, output_tokens=25)  # no time passed
    impossible = start(found, RequestProfile(1.0, 25.0), 2.0)
    impossible.work_estimate = 100.0
    found.finish(impossible, 4.0, output_tokens=0)  # no work is left
    assert found.seconds_per_unit == 0.005


def test_a_request_ends_once() -> None:
    found = pool(1)
    one = start(found)
    found.finish(one, 1.0, output_tokens=25)
    speed = found.seconds_per_unit
    found.finish(one, 2.0, output_tokens=25)
    found.cancel(one)
    assert (found.running, found.seconds_per_unit, one.done) == (0, speed, True)
    queued = found.enqueue(TYPICAL, 2.0)
    found.finish(queued, 2.0, output_tokens=25)
    assert found.depth == 1, "a queued request cannot finish"


def test_what_a_finished_request_did_not_use_is_removed_from_the_work() -> None:
    found = pool(1)
    one = start(found)
    endpoint = found.endpoints["r0"]
    assert endpoint.remaining_work(0.0, 0.005) == 200.0
    found.finish(one, 0.5)  # 100 units of time, so 100 units are left; they are removed
    assert endpoint.remaining_work(0.5, 0.005) == 0.0
    first, second = start(found, now_s=1.0), start(found, now_s=1.0)
    found.finish(first, 1.5)  # half of the replica: 50 of its 200 units; 400 - 100 done - 150
    assert endpoint.remaining_work(1.5, 0.005) == pytest.approx(150.0) and second.work_estimate == 200.0


def test_the_predicted_wait() -> None:
    found = pool(2, 1)
    assert found.predicted_wait_s(1, 0.0) == 0.0
    start(found)
    assert found.predicted_wait_s(1, 0.0) == 0.0, "one replica is free"
    start(found)
    assert found.predicted_wait_s(1, 0.0) == pytest.approx(0.5 * 200 * 0.005 / 2)
    low = found.enqueue(RequestProfile(100.0, 25.0, priority=2), 0.0)
    found.enqueue(RequestProfile(300.0, 25.0, priority=1), 0.0)
    assert found.predicted_wait_s(0, 0.0) == pytest.approx(0.25)
    assert found.predicted_wait_s(1, 0.0) == pytest.approx((400 + 100) * 0.005 / 2)
    assert found.predicted_wait_s(2, 0.0) == pytest.approx((600 + 100) * 0.005 / 2)
    found.cancel(low)
    found.cancel(low)
    assert found.predicted_wait_s(2, 0.0) == pytest.approx((400 + 100) * 0.005 / 2)
    found.endpoints["r0"].ready = False
    assert found.predicted_wait_s(2, 0.0) == pytest.approx((400 + 100) * 0.005)
    found.endpoints["r1"].canary = True
    assert found.predicted_wait_s(2, 0.0) == math.inf


def test_a_request_waits_behind_the_queue_even_if_a_slot_is_free() -> None:
    found = pool(1, 1)
    found.enqueue(TYPICAL, 0.0)
    assert found.waiting and found.depth == 1
    assert found.predicted_wait_s(1, 0.0) == pytest.approx((200 + 100) * 0.005)
    found.endpoints["r0"].ready = False
    assert found.predicted_wait_s(1, 0.0) == math.inf


def test_the_typical_work_follows_the_requests() -> None:
    found = pool(1, 1)
    start(found, RequestProfile(400.0, 50.0))  # 600 units: 200 + 0.1 * 400
    assert found.predicted_wait_s(1, 0.0) == pytest.approx(0.5 * 240 * 0.005)


def test_an_empty_pool_predicts_an_endless_wait_and_dispatches_nothing() -> None:
    found = pool(0)
    assert found.predicted_wait_s(1, 0.0) == math.inf and not found.waiting and found.running == 0
    queued = found.enqueue(TYPICAL, 0.0)
    assert list(found.dispatch(0.0)) == [] and found.depth == 1 and found.arrived == 1
    found.cancel(queued)
    assert list(found.dispatch(0.0)) == [] and found.depth == 0 and not found.waiting


def test_requests_expire_at_their_deadline() -> None:
    found = pool(0)
    queued = found.enqueue(RequestProfile(1.0, 1.0, queue_timeout_s=2.0), 1.0)
    assert list(found.pop_expired(2.9)) == [] and list(found.pop_expired(3.0)) == [queued] and queued.done
    assert list(found.pop_expired(9.0)) == []


def test_a_dispatched_request_does_not_expire() -> None:
    found = pool(1)
    one = start(found, RequestProfile(1.0, 1.0, queue_timeout_s=2.0))
    assert list(found.pop_expired(9.0)) == [] and not one.done and found.running == 1


@pytest.mark.parametrize(("running", "free_for_low"), [(1, 8), (2, 6), (4, 4), (5, 2)])
def test_low_priority_leaves_one_standard_deviation_of_slots(running: int, free_for_low: int) -> None:
    found = pool(1, 10)
    for _ in range(running):
        start(found, RequestProfile(1.0, 1.0, priority=0))
    for _ in range(10):
        found.enqueue(RequestProfile(1.0, 1.0, priority=2), 0.0)
    # a slot is given while more are free than reserved: ceil(sqrt(running))
    assert len(list(found.dispatch(0.0))) == free_for_low


def test_finished_requests_reserve_no_slots() -> None:
    found = pool(1, 4)
    ones = [start(found, RequestProfile(1.0, 1.0, priority=0)) for _ in range(4)]
    for one in ones:
        found.finish(one, 1.0)
    for _ in range(4):
        found.enqueue(RequestProfile(1.0, 1.0, priority=1), 1.0)
    assert len(list(found.dispatch(1.0))) == 4


def test_the_least_loaded_replica_is_chosen_then_the_one_with_fewer_requests() -> None:
    found = pool(3, 8)
    found.endpoints["r0"].add_work(10.0, 0.0, 0.005)
    found.endpoints["r1"].running = 1
    assert name_of(start(found)) == "r2"
    found.endpoints["r2"].ready = False
    assert name_of(start(found)) == "r1"


def test_round_robin_takes_the_one_with_the_fewest_dispatched() -> None:
    found = pool(2, 8, routing="round-robin")
    found.endpoints["r0"].dispatched = 2
    assert [name_of(start(found)) for _ in range(3)] == ["r1", "r1", "r0"]


@pytest.mark.parametrize(("ahead", "name"), [(199.0, "r0"), (201.0, "r1")])
def test_loading_an_adapter_costs_200_units(ahead: float, name: str) -> None:
    found = pool(2, 8)
    found.endpoints["r0"].adapters.add("fine")
    found.endpoints["r0"].add_work(ahead, 0.0, 0.005)
    one = start(found, RequestProfile(1.0, 1.0, adapter="fine"))
    assert name_of(one) == name and one.endpoint and one.endpoint.adapters == {"fine"}


@pytest.mark.parametrize(("ahead", "name"), [(-1.0, "r0"), (1.0, "r1")])
def test_a_cached_prefix_is_worth_its_tokens(ahead: float, name: str) -> None:
    found, blocks = pool(2, 8), tuple(block_hashes("a" * 5 * BLOCK_CHARS))
    tokens = 5 * BLOCK_CHARS / 4
    profile = RequestProfile(tokens + 50, 0.0, blocks=blocks)
    first = start(found, profile)
    assert name_of(first) == "r0" and first.work_estimate == tokens + 50
    found.finish(first, 10.0)
    found.endpoints["r0"].add_work(tokens + ahead, 10.0, 0.005)
    second = start(found, profile, 10.0)
    assert name_of(second) == name
    assert second.work_estimate == (50.0 if name == "r0" else tokens + 50)


def test_a_cached_prefix_saves_no_more_than_the_prompt_and_no_output() -> None:
    found, blocks = pool(1, 8), tuple(block_hashes("a" * 5 * BLOCK_CHARS))
    start(found, RequestProfile(5 * BLOCK_CHARS / 4, 10.0, blocks=blocks))
    assert start(found, RequestProfile(7.0, 10.0, blocks=blocks)).work_estimate == 40.0


def test_a_canary_without_weight_receives_nothing() -> None:
    found = pool(1, 1)
    found.add(Endpoint("new", "h:9", 8, canary=True))
    start(found)
    queued = found.enqueue(TYPICAL, 0.0)
    assert list(found.dispatch(0.0)) == [] and found.predicted_wait_s(1, 0.0) > 0
    found.canary_weight = 0.01
    assert list(found.dispatch(0.0)) == [queued] and name_of(queued) == "new"


def test_two_least_loaded_others_are_the_fallbacks() -> None:
    found = pool(6, 8)
    for number, work in enumerate((0.0, 50.0, 10.0, 30.0, 1.0, 2.0)):
        found.endpoints[f"r{number}"].add_work(work, 0.0, 0.005)
    found.endpoints["r4"].ready = False
    found.endpoints["r5"].canary = True
    one = start(found)
    assert name_of(one) == "r0"
    assert [other.name for other in found.fallback_endpoints(one, 0.0)] == ["r2", "r3"]
    found.endpoints["r2"].ready = found.endpoints["r3"].ready = False
    assert [other.name for other in found.fallback_endpoints(one, 0.0)] == ["r1"]


def test_fallbacks_of_a_large_pool_are_found_among_all() -> None:
    found = pool(100, 8)
    one = start(found)
    for name, endpoint in found.endpoints.items():
        endpoint.ready = name in ("r98", "r99")
    assert {other.name for other in found.fallback_endpoints(one, 0.0)} == {"r98", "r99"} - {name_of(one)}


def test_a_large_pool_is_compared_by_sixteen_at_random_and_those_with_the_prefix() -> None:
    found = pool(33, 1)
    assert len(list(found._compared())) == 16
    holders = [dict.fromkeys(list(found.endpoints.values())[:3])]
    assert len(list(found._compared(holders))) == 19
    next(iter(holders[0])).removed = True
    assert len(list(found._compared(holders))) == 18
    many = [dict.fromkeys(list(found.endpoints.values())[:20])]
    assert len(list(found._compared(many))) in range(30, 33)
    found.remove("r0")
    assert len(list(found._compared())) == 32, "a small pool is compared as a whole"
    found = pool(33, 1)
    found.add(Endpoint("new", "h:9", 1, canary=True))
    assert len(list(found._compared())) == 34, "canaries must be found"


def test_a_removed_replica_receives_nothing() -> None:
    found = pool(2, 1)
    one = found.endpoints["r0"]
    found.remove("r0")
    found.remove("r0")
    assert one.removed and list(found.endpoints) == ["r1"]
    assert [name_of(start(found))] == ["r1"]
    found.enqueue(TYPICAL, 0.0)
    assert list(found.dispatch(0.0)) == []
    again = Endpoint("r1", "h:5", 1)
    found.add(again)
    assert [name.endpoint for name in found.dispatch(0.0)] == [again]


def test_a_request_that_runs_alone_takes_the_emptiest_replica_of_the_ready_ones() -> None:
    found = pool(3, 4)
    busy = start(found)
    assert name_of(busy) == "r0"
    found.endpoints["r1"].add_work(10.0, 0.0, 0.005)
    found.endpoints["r2"].ready = False
    alone = found.enqueue(TYPICAL, 0.0, exclusive=True)
    assert list(found.dispatch(0.0)) == [alone] and name_of(alone) == "r1"
    other = found.enqueue(TYPICAL, 0.0)
    assert list(found.dispatch(0.0)) == [other] and name_of(other) == "r0", "nothing joins it"
    assert found.predicted_wait_s(1, 0.0) == 0.0
    found.finish(alone, 1.0)
    assert found.endpoints["r1"].reserved_for is None


def test_a_reservation_moves_if_its_replica_fails_before_the_start() -> None:
    found = pool(2, 2)
    first, second = start(found), start(found)
    alone = found.enqueue(TYPICAL, 0.0, exclusive=True)
    assert list(found.dispatch(0.0)) == [] and found.waiting
    reserved = next(one for one in found.endpoints.values() if one.reserved_for is alone)
    reserved.ready = False
    assert list(found.dispatch(0.0)) == [] and reserved.reserved_for is None
    other = next(one for one in found.endpoints.values() if one is not reserved)
    assert other.reserved_for is alone
    for one in (first, second):
        found.finish(one, 1.0)
    assert list(found.dispatch(1.0)) == [alone] and alone.endpoint is other
