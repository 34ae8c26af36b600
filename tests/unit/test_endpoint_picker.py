"""Parts of an endpoint picker: subset queues, counting of answers, endpoints of pods and files, lists and watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from powerband.core.recipe import label_value
from powerband.errors import InputError
from powerband.serve.discovery import kubernetes
from powerband.serve.discovery.api_server import ApiServer, Credentials, Watched
from powerband.serve.discovery.file import read
from powerband.serve.router.answer_usage import AnswerUsage
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile


def pool(*, replicas: int = 3, max_in_flight: int = 1) -> EndpointPool:
    found = EndpointPool(RequestProfile(100.0, 25.0), rate_per_s=1.0)
    for number in range(replicas):
        found.add(Endpoint(f"r{number}", f"h:{number}", max_in_flight))
    return found


def enqueue(found: EndpointPool, *subset: str, priority: int = 1) -> QueuedRequest:
    allowed = frozenset(subset) if subset else None
    return found.enqueue(RequestProfile(10, 10, priority=priority, subset=allowed), 0.0)


def test_a_request_that_waits_for_its_subset_does_not_hold_up_others() -> None:
    found = pool()
    first, second, free = enqueue(found, "h:0"), enqueue(found, "h:0"), enqueue(found)
    assert set(found.dispatch(0.0)) == {first, free} and found.depth == 1
    assert first.endpoint is found.endpoints["r0"] and free.endpoint is not first.endpoint
    found.finish(first, 1.0)
    assert list(found.dispatch(1.0)) == [second] and second.endpoint is found.endpoints["r0"]


def test_subsets_are_served_by_priority_and_arrival() -> None:
    found = pool(replicas=1)
    running = enqueue(found)
    assert list(found.dispatch(0.0)) == [running]
    later, high, cancelled = enqueue(found, "h:0"), enqueue(found, "h:0", "h:9", priority=0), enqueue(found, "h:0")
    found.cancel(cancelled)
    found.finish(running, 1.0)
    assert list(found.dispatch(1.0)) == [high]
    found.finish(high, 2.0)
    assert list(found.dispatch(2.0)) == [later]
    found.finish(later, 3.0)
    assert not list(found.dispatch(3.0)) and not found.waiting
    found.remove("r0")
    assert found.subset(["h:0"]) == []


def test_fallbacks_are_of_the_subset() -> None:
    found = pool()
    queued = enqueue(found, "h:0", "h:1")
    list(found.dispatch(0.0))
    assert queued.endpoint is not None
    assert {queued.endpoint.address} | {one.address for one in found.fallback_endpoints(queued, 0.0)} == {"h:0", "h:1"}


def test_a_request_moves_to_the_endpoint_that_serves_it() -> None:
    found = pool(replicas=2, max_in_flight=4)
    queued = enqueue(found, "h:0")
    list(found.dispatch(0.0))
    chosen, served = found.endpoints["r0"], found.endpoints["r1"]
    found.move(queued, served, 0.5)
    assert (chosen.running, served.running) == (0, 1) and chosen.remaining_work(0.5, 0.01) == 0
    found.finish(queued, 1.0, output_tokens=10)
    assert (chosen.running, served.running) == (0, 0)


def test_requests_from_elsewhere_take_slots() -> None:
    found = pool(replicas=2)
    found.endpoints["r0"].others = 1
    queued = enqueue(found)
    assert list(found.dispatch(0.0)) == [queued] and queued.endpoint is found.endpoints["r1"]
    enqueue(found)
    assert not list(found.dispatch(0.0))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_tokens_are_counted_however_the_bytes_are_cut(size: int) -> None:
    event = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    text = event * 30 + b"data: [DONE]\n\n"
    told = event * 5 + b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 12}}\n\ndata: [DONE]\n\n'
    broken = event + b'data: {"error": {"message": "x"}}\n\n'
    found = []
    for body in (text, told, broken):
        usage = AnswerUsage()
        for start in range(0, len(body), size):
            usage.add(body[start : start + size])
        found.append((usage.prompt_tokens, usage.output_tokens, usage.failed))
    assert found == [(0, 30, False), (7, 12, False), (0, 2, True)]


def pod(name: str, *, ip: str = "10.0.0.1", ready: str = "True", **metadata: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:01:30Z"}
    status = {"phase": "Running", "podIP": ip, "startTime": "2026-01-01T00:00:00Z", "conditions": [condition]}
    return {"metadata": {"name": name, **metadata}, "status": status}


def test_endpoints_of_pods() -> None:
    pods = [
        pod("a", labels={"powerband.dev/recipe": "fast"}),
        pod("b", ip="fd00::1", ready="False"),
        pod("c", deletionTimestamp="2026-01-01T00:00:00Z"),
        {"metadata": {"name": "d"}, "status": {"phase": "Pending"}},
        {**pod("e"), "status": {**pod("e")["status"], "phase": "Failed"}},
    ]
    found = kubernetes.endpoints(pods, (8000, 8001))
    assert [(one.name, one.address, one.ready) for one in found] == [
        ("a:8000", "10.0.0.1:8000", True), ("a:8001", "10.0.0.1:8001", True),
        ("b:8000", "[fd00::1]:8000", False), ("b:8001", "[fd00::1]:8001", False),
        ("c:8000", "10.0.0.1:8000", False), ("c:8001", "10.0.0.1:8001", False),
    ]  # fmt: skip
    assert found[0].recipe == "fast" and found[0].start_s == 90.0 and found[2].start_s is None


def test_endpoints_of_a_file() -> None:
    found = read("- 10.0.0.1:80\n- {address: 10.0.0.2:80, name: b, recipe: fast}\n", source="f")
    assert [(one.name, one.address, one.recipe) for one in found] == [
        ("10.0.0.1:80", "10.0.0.1:80", ""), ("b", "10.0.0.2:80", "fast"),
    ]  # fmt: skip
    assert read("", source="f") == []
    for bad in ("- 10.0.0.1", "a: 1", "- {address: x:1, other: 1}", "- [", "- x:99999"):
        with pytest.raises(InputError, match="f"):
            read(bad, source="f")


def test_label_values() -> None:
    assert label_value("Llama 3.3: fast!") == "Llama-3.3-fast" and len(label_value("x" * 99)) == 63


def test_a_kubeconfig_without_a_way_in_says_so(tmp_path: Path) -> None:
    file = tmp_path / "config"
    for text in ("", "a: [", yaml.safe_dump({"current-context": "x", "contexts": []})):
        file.write_text(text)
        with pytest.raises(InputError, match="kubeconfig"):
            Credentials.from_kubeconfig(file)


def listed(version: str, *names: str, **metadata: str) -> httpx.Response:
    items = [{"metadata": {"name": name}} for name in names]
    return httpx.Response(200, json={"metadata": {"resourceVersion": version, **metadata}, "items": items})


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": {"name": name, "resourceVersion": version}}}


async def follow(answers: list[Any], wanted: Callable[[Watched], bool]) -> tuple[Watched, list[dict[str, str]]]:
    """Follow objects with these answers until a condition holds; return the queries."""
    queries: list[dict[str, str]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        queries.append(dict(request.url.params))
        if not answers:
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, list):
            return httpx.Response(200, text="".join(json.dumps(one) + "\n" for one in answer))
        assert isinstance(answer, httpx.Response)
        return answer

    async with ApiServer(Credentials("http://api")) as api:
        await api._http.aclose()
        api._http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(handle))
        changed = asyncio.Event()
        watched = Watched(api, "/pods", changed.set, labelSelector="a=b")
        running = asyncio.create_task(watched.run())
        async with asyncio.timeout(10):
            while not (wanted(watched) and not answers):
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return watched, queries


async def test_a_watch_continues_where_it_broke_and_pages_are_joined() -> None:
    answers = [
        listed("5", "a", **{"continue": "next"}),
        listed("5", "b"),
        [event("ADDED", "c", "6"), event("DELETED", "a", "7"), event("BOOKMARK", "", "9")],
        httpx.ReadError("reset"),
        [event("ADDED", "d", "10")],
    ]
    watched, queries = await follow(answers, lambda one: "d" in one.objects)
    assert set(watched.objects) == {"b", "c", "d"} and watched.relists == 1
    assert queries[1]["continue"] == "next" and all(one["labelSelector"] == "a=b" for one in queries)
    assert [one["resourceVersion"] for one in queries if "watch" in one][:4] == ["5", "9", "9", "10"]
    assert all(one["allowWatchBookmarks"] == "true" for one in queries if "watch" in one)


@pytest.mark.parametrize("gone", [httpx.Response(410), [{"type": "ERROR", "object": {"code": 410}}]])
async def test_objects_are_listed_again_when_their_version_is_gone(gone: Any) -> None:
    answers = [listed("5", "a"), gone, listed("50", "b"), [event("ADDED", "c", "51")]]
    watched, queries = await follow(answers, lambda one: "c" in one.objects)
    assert set(watched.objects) == {"b", "c"} and watched.relists == 2
    assert [one.get("resourceVersion") for one in queries if "watch" in one][:2] == ["5", "50"]


async def test_objects_stay_while_the_server_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [listed("5", "a"), httpx.ConnectError("refused"), httpx.Response(503, text="x"), httpx.Response(403)]
    watched, _ = await follow(answers, lambda one: not one.connected)
    assert set(watched.objects) == {"a"} and not watched.connected
    assert "refused" in capsys.readouterr().err
