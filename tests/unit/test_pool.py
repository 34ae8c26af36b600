"""Who is served next, and where: the picker's heart, told the time."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerband.core.fleet import Fleet, Tenants
from powerband.core.prefix_hash import BLOCK, block_hashes
from powerband.serve.router import admission, requests
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile
from powerband.serve.router.prefix_index import PrefixIndex
from powerband.serve.router.requests import Refused
from powerband.serve.router.scheduler import RequestOutcome, RequestScheduler
from powerband.serve.spec import ModelSpec


def pool(*, replicas: int = 2, most: int = 2, **more: Any) -> EndpointPool:
    found = EndpointPool(RequestProfile(100.0, 25.0), rate_per_s=1.0, **more)
    for number in range(replicas):
        found.add(Endpoint(f"r{number}", f"h:{number}", most))
    return found


def sent(found: EndpointPool, now_s: float) -> list[QueuedRequest]:
    return list(found.dispatch(now_s))


def where(ticket: QueuedRequest) -> str:
    assert ticket.backend is not None
    return ticket.backend.name


def test_nobody_gets_more_at_once_than_was_proven() -> None:
    found = pool()
    for _ in range(6):
        found.enter(RequestProfile(10, 10), 0.0)
    first = sent(found, 0.0)
    assert len(first) == 4 and found.depth == 2 and found.running == 4
    assert [one.running for one in found.backends.values()] == [2, 2]
    found.finish(first[0], 1.0, output_tokens=10)
    assert len(sent(found, 1.0)) == 1 and found.depth == 1


def test_the_speed_is_learned_right_from_answers_that_end_together() -> None:
    found = pool(replicas=1, most=8)
    for wave in range(20):
        for _ in range(8):
            found.enter(RequestProfile(100.0, 25.0), float(wave))
        for one in sent(found, float(wave)):
            found.finish(one, wave + 1.0, output_tokens=25)
    assert found.unit_s == pytest.approx(1 / (8 * 200), rel=0.01)


def test_the_first_class_goes_first_and_those_of_a_class_as_they_came() -> None:
    found = pool(replicas=1, most=1)
    running = found.enter(RequestProfile(10, 10), 0.0)
    assert sent(found, 0.0) == [running]
    low, normal, other, high = (found.enter(RequestProfile(10, 10, priority=rank), 0.0) for rank in (2, 1, 1, 0))
    order = []
    for now_s in range(1, 5):
        found.finish(running, float(now_s), output_tokens=10)
        (running,) = sent(found, float(now_s))
        order.append(running)
    assert order == [high, normal, other, low]


def test_work_decides_and_not_the_number_of_requests() -> None:
    found = pool(most=8)
    found.enter(RequestProfile(4000, 500), 0.0)
    (large,) = sent(found, 0.0)
    for _ in range(3):
        found.enter(RequestProfile(20, 10), 0.0)
    assert {where(one) for one in sent(found, 0.0)} == {"r0", "r1"} - {where(large)}


def test_a_prefix_attracts_until_its_holder_is_busy() -> None:
    found = pool(most=50)
    blocks = tuple(block_hashes("x" * 20 * BLOCK))
    ask = RequestProfile(20 * BLOCK / 4, 20, blocks=blocks)
    found.enter(ask, 0.0)
    (first,) = sent(found, 0.0)
    found.finish(first, 1.0, output_tokens=20)
    found.enter(ask, 1.0)
    (second,) = sent(found, 1.0)
    assert where(second) == where(first)
    for _ in range(30):
        found.enter(ask, 1.0)
    homes = [where(one) for one in sent(found, 1.0)]
    assert 5 <= homes.count("r0") <= 25, "one hot prefix piles onto one replica"


def test_a_lower_class_leaves_room_for_a_higher_one_that_is_about() -> None:
    found = pool(replicas=1, most=8)
    for _ in range(4):
        found.enter(RequestProfile(10, 10, priority=0), 0.0)
    for _ in range(8):
        found.enter(RequestProfile(10, 10, priority=2), 0.0)
    assert [one.ask.priority for one in sent(found, 0.0)] == [0, 0, 0, 0, 2, 2]
    found.enter(RequestProfile(10, 10, priority=0), 0.0)
    assert [one.ask.priority for one in sent(found, 0.0)] == [0]


def test_round_robin_takes_turns() -> None:
    found = pool(most=50, routing="round-robin")
    for _ in range(10):
        found.enter(RequestProfile(10, 10), 0.0)
    assert [where(one) for one in sent(found, 0.0)] == ["r0", "r1"] * 5


def test_an_adapter_stays_where_it_is_loaded() -> None:
    found = pool(most=50)
    found.enter(RequestProfile(10, 10, adapter="a"), 0.0)
    (first,) = sent(found, 0.0)
    found.finish(first, 1.0, output_tokens=10)
    for _ in range(3):
        found.enter(RequestProfile(10, 10, adapter="a"), 1.0)
    assert {where(one) for one in sent(found, 1.0)} == {where(first)}


def test_who_waited_too_long_or_gave_up_is_not_sent() -> None:
    found = pool(replicas=1, most=1)
    running = found.enter(RequestProfile(10, 10), 0.0)
    sent(found, 0.0)
    hasty, gone, last = (
        found.enter(RequestProfile(10, 10, queue_timeout_s=wait), 0.0) for wait in (1.0, 9.0, math.inf)
    )
    found.leave(gone)
    assert list(found.expired(1.5)) == [hasty] and found.depth == 1
    found.finish(running, 2.0, output_tokens=10)
    assert sent(found, 2.0) == [last]
    assert not list(found.expired(100.0))


def test_the_wait_is_that_of_those_ahead() -> None:
    found = pool(replicas=1, most=1)
    assert found.wait_s(1, 0.0) == 0.0
    found.enter(RequestProfile(100, 25), 0.0)
    sent(found, 0.0)
    for _ in range(4):
        found.enter(RequestProfile(100, 25, priority=1), 0.0)
    assert found.wait_s(0, 0.0) == pytest.approx(0.5)
    assert found.wait_s(1, 0.0) == pytest.approx(4.5)
    found.backends["r0"].ready = False
    assert found.wait_s(1, 0.0) == math.inf


def test_a_recipe_on_trial_gets_its_share() -> None:
    found = pool(replicas=1, most=1000)
    found.add(Endpoint("new", "h:9", 1000, canary=True))
    found.share = 0.2
    for _ in range(100):
        found.enter(RequestProfile(10, 10), 0.0)
    assert sum(where(one) == "new" for one in sent(found, 0.0)) == 20


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "finish", "leave", "expire", "dispatch"]), st.integers(0, 9)), max_size=80
    )
)
def test_nothing_is_lost_whatever_happens(steps: list[tuple[str, int]]) -> None:
    found, now_s = pool(), 0.0
    waiting: list[QueuedRequest] = []
    running: list[QueuedRequest] = []
    for what, number in steps:
        now_s += 0.5
        if what == "enter":
            waiting.append(
                found.enter(
                    RequestProfile(10 * number + 1, 5, priority=number % 3, queue_timeout_s=number + 1.0), now_s
                )
            )
        elif what == "finish" and running:
            found.finish(running.pop(number % len(running)), now_s, output_tokens=number)
        elif what == "leave" and waiting:
            found.leave(waiting.pop(number % len(waiting)))
        elif what == "expire":
            for one in found.expired(now_s):
                waiting.remove(one)
        for one in found.dispatch(now_s):
            waiting.remove(one)
            running.append(one)
        assert found.depth == len(waiting)
        assert found.running == len(running) <= 4
        assert all(0 <= one.running <= 2 for one in found.backends.values())
        assert found.unit_s > 0


def test_prefixes_are_bounded_and_forgotten_with_their_replica() -> None:
    held = PrefixIndex(most=100)
    for number in range(500):
        held.learn([number], f"r{number % 2}")
    assert len(held) == 100
    held.forget("r0")
    assert len(held) == 50
    first, second = block_hashes("a" * 3 * BLOCK), block_hashes("a" * 2 * BLOCK + "b" * BLOCK)
    held.learn(first, "r1")
    held.learn(first[:1], "r2")
    assert held.matched(second) == {"r1": 2, "r2": 1}


def part(name: str = "m", **more: Any) -> ModelSpec:
    usual = {"prompt_tokens": 100.0, "output_tokens": 25.0, "rate_per_s": 1.0, "queue_timeout_s": 1.0}
    return ModelSpec(name, data={}, recipe="r", replicas=1, in_flight=1, **{**usual, **more})


def backend(name: str, most: int = 1) -> dict[str, Any]:
    return {"name": name, "address": f"{name}:1", "most": most, "ready": True, "recipe": "r", "canary": False}


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


async def test_an_alias_is_renamed_and_an_adapter_is_not() -> None:
    desk = RequestScheduler({"m": part(aliases=("gpt",), adapters=("fine",))})
    desk.backends({"m": [backend("a", 9), backend("b", 9)]}, {})
    plain, alias, adapter = [
        await desk.pick(body(model=name), case=name, tenant="anybody", headers={}) for name in ("m", "gpt", "fine")
    ]
    assert plain.body is None and adapter.body is None
    assert alias.body is not None and json.loads(alias.body)["model"] == "m"
    assert sorted(plain.addresses[:2]) == ["a:1", "b:1"] and plain.addresses[:2] == plain.addresses[2:]
    assert plain.recipe == "r"
    with pytest.raises(Refused) as refused:
        await desk.pick(body(model="other"), case="other", tenant="anybody", headers={})
    assert refused.value.status == 404


async def test_a_tenant_pays_for_what_it_got() -> None:
    key, digest = admission.new_key()
    known = Tenants.model_validate({"tenants": {"me": {"key_sha256": digest, "in_flight": 1, "models": ["m"]}}})
    desk = RequestScheduler({"m": part(usd_per_1m_tokens=2.0), "n": part("n")}, known)
    desk.backends({"m": [backend("a", 9)], "n": [backend("b")]}, {})
    assert desk.door.known(f"Bearer {key}") == "me"
    assert list(desk.models("me")) == ["m"]
    await desk.pick(body(), case="first", tenant="me", headers={})
    for wanted, status in (("m", 429), ("n", 403)):
        with pytest.raises(Refused) as refused:
            await desk.pick(body(model=wanted), case=wanted, tenant="me", headers={})
        assert refused.value.status == status
    desk.end("first", RequestOutcome(200, output_tokens=500_000, prompt_tokens=7))
    account = desk.door.account("me")
    assert (account.usd, account.prompt_tokens, account.running, account.refused) == (1.0, 7, 0, 2)


async def test_when_envoy_is_gone_its_places_are_free_again() -> None:
    desk = RequestScheduler({"m": part(queue_timeout_s=50.0)})
    desk.backends({"m": [backend("a")]}, {})
    await desk.pick(body(), case="first", tenant="anybody", headers={})
    second = asyncio.create_task(desk.pick(body(), case="second", tenant="anybody", headers={}))
    await asyncio.sleep(0)
    desk.abandon()
    assert (await second).replica == "a"
    assert desk.pools["m"].running == 1


async def test_who_leaves_the_queue_leaves_no_place_taken() -> None:
    desk = RequestScheduler({"m": part(queue_timeout_s=50.0)})
    desk.backends({"m": [backend("a")]}, {})
    await desk.pick(body(), case="first", tenant="anybody", headers={})
    second = asyncio.create_task(desk.pick(body(), case="second", tenant="anybody", headers={}))
    await asyncio.sleep(0)
    for _ in range(2):  # Envoy tells of its end, and its stream ends too
        desk.end("second", RequestOutcome(status=0))
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (desk.pools["m"].running, desk.pools["m"].depth, desk.door.account("anybody").running) == (1, 0, 1)
    desk.end("first", RequestOutcome(200, output_tokens=3))
    assert (desk.pools["m"].running, desk.door.account("anybody").running, desk.cases) == (0, 0, {})


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_body_breaks_the_parser(data: bytes) -> None:
    try:
        requests.read(data)
    except Refused as no:
        assert json.loads(no.body)["error"]["code"]


def test_a_fleet_that_contradicts_itself_is_refused() -> None:
    for models in (
        {"a": {"recipe": "r", "fallback": "b"}},
        {"a": {"recipe": "r", "fallback": "a"}},
        {"a": {"recipe": "r", "aliases": ["b"]}, "b": {"recipe": "r"}},
    ):
        with pytest.raises(ValueError):
            Fleet.model_validate({"models": models})
