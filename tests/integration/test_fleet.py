"""A fleet of golden servers behind a real Envoy: what is routed, queued, refused, and what survives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from powerband import observe, rollout
from powerband.errors import InputError
from powerband.serve import Fleet, FleetSpec
from powerband.serve.router import admission
from powerband.testing.golden import DEADLY
from support import fleets
from support.fleets import CHAT

pytest.importorskip("grpc")


async def chat(http: httpx.AsyncClient, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)


def replicas(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in fleet.status()["replicas"]}


async def busy(fleet: Fleet, model: str = "golden") -> str:
    """Return the replica that is answering something."""
    for _ in range(100):
        for name, running in fleet.status()["pools"][model]["running"].items():
            if running:
                return str(name)
        await asyncio.sleep(0.05)
    raise AssertionError("nobody is busy")


async def back(fleet: Fleet, victim: dict[str, Any]) -> None:
    """Return when a replica that was killed is there again, where it was."""
    for _ in range(200):
        found = replicas(fleet)[victim["name"]]
        if found["state"] == "ready" and found["starts"] > victim["starts"]:
            assert found["address"] == victim["address"]
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{victim['name']} is not back")


async def starts(fleet: Fleet) -> int:
    """Return the number of starts of all replicas, once all are ready."""
    while any(one["state"] != "ready" for one in replicas(fleet).values()):
        await asyncio.sleep(0.1)
    return sum(one["starts"] for one in replicas(fleet).values())


async def answers_again(http: httpx.AsyncClient, since: float) -> float:
    while time.monotonic() < since + 20:
        try:
            if (await chat(http)).status_code == 200:
                return time.monotonic() - since
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("it does not answer any more")


async def test_it_serves_and_says_who_answered(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        answers = await asyncio.gather(*(chat(http) for _ in range(8)))
        assert {one.status_code for one in answers} == {200}
        assert {one.headers["x-powerband-replica"] for one in answers} == {"golden-1", "golden-2"}
        assert {one.headers["x-powerband-recipe"] for one in answers} == {"golden"}
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["golden"]
        assert (await fleets.events(http))[-1] == "[DONE]"
        refused = [
            await http.get("/other"),
            await chat(http, model="other"),
            await http.post("/v1/chat/completions", content=b"{{"),
            await http.get("/v1/completions"),
        ]
        assert [one.status_code for one in refused] == [404, 404, 400, 405]
        assert all(one.json()["error"]["code"] for one in refused)
        page = (await http.get("/metrics")).text
        counted = re.search(r"powerband_ttft_seconds_count\{(.*)\} 9.0", page)
        assert counted and 'model="golden"' in counted[1] and 'class="normal"' in counted[1]
        everyone = fleets.processes(fleet)
        assert len(everyone) > 6
    assert not [one for one in everyone if one.is_running() and one.status() != "zombie"]


async def test_a_warm_replica_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 1, "warm": 1}}, startup_s=5.0)

    async def states(*wanted: str) -> dict[str, str]:
        for _ in range(200):
            found = {name: str(one["state"]) for name, one in replicas(fleet).items()}
            if sorted(found.values()) == sorted(wanted):
                return {state: name for name, state in found.items()}
            await asyncio.sleep(0.1)
        raise AssertionError(found)

    async with fleets.running(path) as (fleet, http):
        before = await states("ready", "warm")
        assert {(await chat(http)).headers["x-powerband-replica"] for _ in range(5)} == {before["ready"]}
        os.kill(replicas(fleet)[before["ready"]]["pid"], signal.SIGKILL)
        assert await answers_again(http, time.monotonic()) < 4
        assert (await chat(http)).headers["x-powerband-replica"] == before["warm"]
        assert await states("ready", "warm") == {"ready": before["warm"], "warm": before["ready"]}


async def test_a_hung_replica_loses_no_request_without_a_token_and_comes_back(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 2, "in_flight": 8}})
    async with fleets.running(path, slo_ttft_s=1.0) as (fleet, http):
        before = replicas(fleet)
        victim = before["golden-1"]

        async def state(wanted: str, within_s: float) -> float:
            began = time.monotonic()
            while replicas(fleet)["golden-1"]["state"] != wanted:
                assert time.monotonic() < began + within_s, replicas(fleet)["golden-1"]
                await asyncio.sleep(0.05)
            return time.monotonic() - began

        os.kill(victim["pid"], signal.SIGSTOP)
        try:
            waiting = [asyncio.create_task(chat(http)) for _ in range(10)]
            assert await state("hung", 15) < 12
            answers = await asyncio.gather(*waiting)
            assert [one.status_code for one in answers] == [200] * 10, "those of the hung replica go to the other one"
            assert {(await chat(http)).headers["x-powerband-replica"] for _ in range(5)} == {"golden-2"}
        finally:
            os.kill(victim["pid"], signal.SIGCONT)
        assert await state("ready", 10) < 5
        assert {name: one["starts"] for name, one in replicas(fleet).items()} == {"golden-1": 1, "golden-2": 1}
        answers = await asyncio.gather(*(chat(http) for _ in range(8)))
        assert {one.headers["x-powerband-replica"] for one in answers} == {"golden-1", "golden-2"}


async def test_crowds_that_leave_in_the_middle_leave_no_place_taken(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 1, "in_flight": 4}}, ttft_s=0.05, itl_s=0.02)
    async with fleets.running(path) as (fleet, http):
        for _ in range(3):
            tasks = [asyncio.create_task(fleets.events(http, max_tokens=200)) for _ in range(24)]
            await asyncio.sleep(0.7)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(50):
            pool = fleet.status()["pools"]["golden"]
            if not pool["running"]["golden-1"] and not pool["depth"]:
                break
            await asyncio.sleep(0.1)
        assert pool["running"] == {"golden-1": 0} and pool["depth"] == 0
        assert (await chat(http)).status_code == 200


async def test_a_client_cannot_choose_where_it_goes(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        inside = f"127.0.0.1:{fleet.spec.admin_port}"
        answer = await chat(http, {"x-gateway-destination-endpoint": inside, "x-powerband-replica": "me"})
        assert answer.status_code == 200
        assert answer.headers["x-powerband-replica"] in replicas(fleet)
        assert (await http.get("/ready", headers={"x-gateway-destination-endpoint": inside})).status_code == 404


async def test_what_waits_goes_by_class_and_is_refused_when_it_would_be_late(tmp_path: Path) -> None:
    path = fleets.write(
        tmp_path, models={"golden": {"replicas": 1, "in_flight": 1, "queue_timeout_s": 1.2}}, ttft_s=0.3, itl_s=0.001
    )
    async with fleets.running(path) as (_, http):
        order: list[str] = []

        async def one(name: str, priority: str) -> int:
            answer = await chat(http, {"x-powerband-priority": priority})
            order.append(name)
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            return answer.status_code

        first = asyncio.create_task(one("first", "low"))
        await asyncio.sleep(0.1)
        low = asyncio.create_task(one("low", "low"))
        await asyncio.sleep(0.05)
        high = asyncio.create_task(one("high", "high"))
        assert set(await asyncio.gather(first, low, high)) == {200}
        assert order == ["first", "high", "low"]
        found = await asyncio.gather(*(one("many", "low") for _ in range(12)))
        assert 200 in found and 429 in found and set(found) == {200, 429}


async def test_who_gives_up_leaves_the_queue(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 1, "in_flight": 1}}, ttft_s=0.5)
    async with fleets.running(path) as (fleet, http):
        first = asyncio.create_task(chat(http))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(chat(http))
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.sleep(0.6)
        assert fleet.status()["pools"]["golden"]["depth"] == 0
        assert (await first).status_code == 200
        assert (await chat(http)).status_code == 200


async def test_what_cannot_wait_overflows_to_the_fallback(tmp_path: Path) -> None:
    models: dict[str, dict[str, Any]] = {
        "golden": {"replicas": 1, "in_flight": 1, "queue_timeout_s": 0.2, "fallback": "small"},
        "small": {"replicas": 1},
    }
    async with fleets.running(fleets.write(tmp_path, models=models, ttft_s=1.0)) as (_, http):
        answers = await asyncio.gather(*(chat(http) for _ in range(4)))
        assert [one.status_code for one in answers] == [200] * 4
        assert sorted(one.headers["x-powerband-recipe"] for one in answers)[-1] == "small (overflow)"
        assert {one.json()["model"] for one in answers} == {"golden", "small"}


async def test_tenants_have_keys_and_limits(tmp_path: Path) -> None:
    keys = {name: admission.new_key() for name in ("rich", "poor", "late")}
    limits = {"rich": {}, "poor": {"rate_per_s": 0.01, "burst": 2}, "late": {}}

    def listed(*names: str) -> None:
        who = {name: {"key_sha256": keys[name][1], **limits[name]} for name in names}
        (tmp_path / "tenants.json").write_text(json.dumps({"powerband": "tenants/1", "tenants": who}))

    listed("rich", "poor")
    path = fleets.write(tmp_path)

    async def status(http: httpx.AsyncClient, key: str) -> int:
        return (await chat(http, {"authorization": f"Bearer {key}"})).status_code

    async with fleets.running(path, tenants=str(tmp_path / "tenants.json")) as (fleet, http):
        assert (await chat(http)).status_code == 401
        assert await status(http, "pb-wrong") == 401
        assert [await status(http, keys["poor"][0]) for _ in range(3)] == [200, 200, 429]
        assert await status(http, keys["rich"][0]) == 200
        assert await status(http, keys["late"][0]) == 401
        listed("rich", "poor", "late")
        for _ in range(40):
            await asyncio.sleep(0.1)
            if (found := await status(http, keys["late"][0])) == 200:
                break
        assert found == 200
        await asyncio.sleep(0.5)
        assert fleet.status()["tenants"]["poor"]["output_tokens"] == 10
        for file in fleet.folder.rglob("*"):
            if file.is_file():
                assert keys["rich"][0].encode() not in file.read_bytes()


async def test_a_request_without_a_token_outlives_its_replica(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path, ttft_s=1.0)) as (fleet, http):
        asked = [asyncio.create_task(chat(http)) for _ in range(4)]
        streams = [asyncio.create_task(fleets.events(http)) for _ in range(4)]
        victim = replicas(fleet)[await busy(fleet)]
        os.kill(victim["pid"], signal.SIGKILL)
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * 4
        for found in await asyncio.gather(*streams):
            assert found[-1] == "[DONE]" and len(found) == 6
        await back(fleet, victim)


async def test_a_request_that_ends_two_engines_is_rejected_and_others_are_answered(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 3}}, fault="dies_on_word", ttft_s=0.5)
    async with fleets.running(path) as (fleet, http):
        before = await starts(fleet)
        others = [asyncio.create_task(chat(http)) for _ in range(12)]
        deadly: dict[str, Any] = {"messages": [{"role": "user", "content": f"a {DEADLY} prompt"}]}
        found = await chat(http, **deadly)
        assert (found.status_code, found.json()["error"]["code"]) == (422, "engine_died")
        assert [one.status_code for one in await asyncio.gather(*others)] == [200] * 12
        again = await chat(http, **deadly)
        assert (again.status_code, again.json()["error"]["code"]) == (422, "quarantined")
        assert (await chat(http)).status_code == 200
        await asyncio.sleep(0.5)
        assert await starts(fleet) == before + 2
        metrics = (await http.get("/metrics")).text
        assert 'powerband_refusals_total{code="engine_died"} 1.0' in metrics
        assert 'powerband_retries_total{reason="died"}' in metrics


async def test_a_stream_that_is_cut_ends_with_an_error(tmp_path: Path) -> None:
    path = fleets.write(tmp_path, models={"golden": {"replicas": 1}}, ttft_s=0.1, itl_s=0.05)
    async with fleets.running(path) as (fleet, http):
        streams = [asyncio.create_task(fleets.events(http, max_tokens=100)) for _ in range(4)]
        await asyncio.sleep(1.0)
        os.kill(replicas(fleet)["golden-1"]["pid"], signal.SIGKILL)
        for found in await asyncio.gather(*streams):
            assert 5 < len(found) < 100
            last = found[-1]
            assert isinstance(last, dict) and last["error"]["code"] == "replica_died"


@pytest.mark.parametrize("name", ["powerband.serve.router.picker", "envoy", "powerband.serve.control.supervisor"])
async def test_it_recovers_from_the_death_of_a_part(tmp_path: Path, name: str) -> None:
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        assert (await chat(http)).status_code == 200
        before = fleets.processes(fleet)
        killed = fleets.helper(fleet, name)
        killed.kill()
        assert await answers_again(http, time.monotonic()) < 15  # two when nothing else runs
        after = {one.pid for one in fleets.processes(fleet)}
        await asyncio.sleep(1.0)
        left = [one for one in before if one.is_running() and one.status() != "zombie" and one.pid not in after]
        assert not left


async def test_queued_requests_outlive_their_picker(tmp_path: Path) -> None:
    tenants, digest = tmp_path / "tenants.yaml", admission.hash_key("pb-a")
    tenants.write_text(f"powerband: tenants/1\ntenants:\n  a: {{key_sha256: {digest}}}\n")
    path = fleets.write(tmp_path, models={"golden": {"replicas": 1, "in_flight": 1}}, ttft_s=0.2, itl_s=0.02)
    async with fleets.running(path, tenants=str(tenants)) as (fleet, http):
        key = {"authorization": "Bearer pb-a"}
        assert (await chat(http, key)).status_code == 200
        waiting = [asyncio.create_task(chat(http, key, max_tokens=20)) for _ in range(6)]
        while fleet.status()["pools"]["golden"]["depth"] < 4:
            await asyncio.sleep(0.02)
        fleets.helper(fleet, "picker").kill()
        began = time.monotonic()
        assert (await chat(http)).status_code == 401
        assert time.monotonic() - began < 3, "the other picker has everything loaded"
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 6


@pytest.mark.parametrize("fault", [None, "answers_wrongly", "crashes"])
async def test_a_rollout_promotes_what_is_as_good_and_nothing_else(tmp_path: Path, fault: str | None) -> None:
    new = {"powerband": "deployment/1", "name": "newer", "variant": {"source": "golden"}, "engine": "fake"}
    (tmp_path / "newer.json").write_text(json.dumps({**new, "config": {"fault": fault} if fault else {}}))
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        stop = asyncio.Event()
        found: list[httpx.Response] = []

        async def user() -> None:
            while not stop.is_set():
                found.append(await chat(http))

        users = [asyncio.create_task(user()) for _ in range(4)]
        verdict = await rollout.rollout(
            fleet.folder, tmp_path / "newer.json", canary_weight=0.3, requests=20, timeout_s=30
        )
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*users)
        assert verdict.promoted == (fault is None)
        assert {one.status_code for one in found} == {200}
        assert found[-1].headers["x-powerband-recipe"] == ("newer" if fault is None else "golden")
        assert [one["recipe"] for one in fleet.status()["replicas"]] == 2 * ["newer" if fault is None else "golden"]


async def test_a_collector_gets_a_span_for_each_part_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[dict[str, Any]] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        got.extend(json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}/")
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with collector, fleets.running(fleets.write(tmp_path, ttft_s=0.2, itl_s=0.05)) as (_, http):
        answer = await chat(http, {"traceparent": f"00-{trace}-{parent}-01"}, stream=True)
        assert answer.status_code == 200
        for _ in range(100):
            if got:
                break
            await asyncio.sleep(0.1)
    spans = {one["name"]: one for one in got}
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    assert {one["traceId"] for one in got} == {trace} and spans["request"]["parentSpanId"] == parent
    assert {spans[name]["parentSpanId"] for name in ("queue", "prefill", "decode")} == {spans["request"]["spanId"]}
    lasted_s = {
        name: (int(one["endTimeUnixNano"]) - int(one["startTimeUnixNano"])) / 1e9 for name, one in spans.items()
    }
    assert 0.15 < lasted_s["prefill"] < 1 and 0.1 < lasted_s["decode"] < 1


async def test_captured_traffic_holds_shared_beginnings_and_no_words(tmp_path: Path) -> None:
    shared = "The house stands on a hill above the river and nobody has lived in it since. " * 4
    async with fleets.running(fleets.write(tmp_path), capture=True) as (fleet, http):
        for number in range(3):
            messages = [{"role": "user", "content": f"{shared} Who, number {number}, was the last?"}]
            assert (await chat(http, messages=messages)).status_code == 200
        for _ in range(50):
            if len(held := observe.read_records(fleet.folder, FleetSpec.read(fleet.folder).model(None))) == 3:
                break
            await asyncio.sleep(0.1)
    first, second, third = (row["hash_ids"] for row in held)
    assert len(first) >= 4 and first[:4] == second[:4] == third[:4]
    assert [row["turns"] for row in held] == [1, 1, 1]
    assert not [file for file in fleet.folder.rglob("*") if file.is_file() and b"nobody has lived" in file.read_bytes()]


def newer(folder: Path, **knobs: Any) -> Path:
    """Write another recipe for the model `golden`."""
    data = {"powerband": "deployment/1", "name": "newer", "variant": {"source": "golden"}, "engine": "fake"}
    (folder / "newer.json").write_text(json.dumps({**data, "config": knobs}))
    return folder / "newer.json"


async def recipes(fleet: Fleet, wanted: set[str]) -> None:
    """Return when these recipes are served and no other."""
    for _ in range(200):
        if {one["recipe"] for one in fleet.status()["replicas"]} == wanted:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the fleet serves {[one['recipe'] for one in fleet.status()['replicas']]}, not {wanted}")


async def test_a_rollout_that_is_killed_is_rolled_back_and_a_second_one_is_refused(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        new = newer(tmp_path)
        first = asyncio.create_task(rollout.rollout(fleet.folder, new, requests=10**6, timeout_s=60))
        await recipes(fleet, {"golden", "newer"})
        with pytest.raises(InputError, match="a rollout of golden is running"):
            await rollout.rollout(fleet.folder, new, timeout_s=5)
        first.cancel()
        await recipes(fleet, {"golden"})
        assert (await chat(http)).headers["x-powerband-recipe"] == "golden"
        assert "it is rolled back" in (fleet.folder / "supervisor.log").read_text()


async def test_a_rollout_is_judged_by_its_own_requests(tmp_path: Path) -> None:
    """The first canary ends each engine that reads a word; the second one of the same name is sound."""
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        stop = asyncio.Event()

        async def user() -> None:
            deadly = {"messages": [{"role": "user", "content": f"a {DEADLY} prompt"}]}
            while not stop.is_set():
                await chat(http, None, **deadly)

        users = [asyncio.create_task(user()) for _ in range(4)]
        bad = await rollout.rollout(
            fleet.folder, newer(tmp_path, fault="dies_on_word"), canary_weight=0.5, requests=40, timeout_s=60
        )
        assert not bad.promoted and "failed" in bad.reason
        good = await rollout.rollout(fleet.folder, newer(tmp_path), canary_weight=0.5, requests=20, timeout_s=60)
        stop.set()
        await asyncio.gather(*users)
        assert good.promoted, good.reason


async def test_a_promotion_that_takes_too_long_is_rolled_back(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path)) as (fleet, http):
        users = [asyncio.create_task(chat(http)) for _ in range(30)]
        found = await rollout.rollout(
            fleet.folder, newer(tmp_path, startup_s=6.0), canary_weight=1.0, requests=0, timeout_s=1.0
        )
        assert not found.promoted
        await asyncio.gather(*users)
        await recipes(fleet, {"golden"})


def served_name(port: int) -> str:
    """Return the common name in the certificate that a listener shows."""
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    done = subprocess.run(
        ["openssl", "x509", "-noout", "-subject"], input=pem, capture_output=True, text=True, check=True
    )
    return done.stdout.rpartition("=")[2].strip()


async def test_tls_and_a_certificate_that_is_replaced(tmp_path: Path) -> None:
    files = fleets.certificate(tmp_path, "first")
    async with fleets.running(fleets.write(tmp_path), tls=files) as (fleet, http):
        assert fleet.url.startswith("https://") and fleet.status()["url"] == fleet.url
        assert (await chat(http)).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(f"http://127.0.0.1:{fleet.spec.port}/health")
        assert await asyncio.to_thread(served_name, fleet.spec.port) == "first"
        streams = [asyncio.create_task(fleets.events(http, max_tokens=200)) for _ in range(4)]
        await asyncio.sleep(1.0)  # their connections have the first certificate
        fleets.certificate(tmp_path, "second")
        for _ in range(50):
            if (name := await asyncio.to_thread(served_name, fleet.spec.port)) == "second":
                break
            await asyncio.sleep(0.1)
        assert name == "second"
        assert [found[-1] for found in await asyncio.gather(*streams)] == ["[DONE]"] * 4


async def test_metrics_of_a_fleet_with_tenants_need_a_key_for_them(tmp_path: Path) -> None:
    keys = {name: admission.new_key() for name in ("user", "prometheus")}
    tenants = {name: {"key_sha256": digest, "metrics": name == "prometheus"} for name, (_, digest) in keys.items()}
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"powerband": "tenants/1", "tenants": tenants}))
    async with fleets.running(fleets.write(tmp_path), tenants=str(file)) as (_, http):
        found = {
            name: (await http.get("/metrics", headers={"authorization": f"Bearer {key}"} if key else {})).status_code
            for name, key in [*((name, key) for name, (key, _) in keys.items()), ("nobody", "")]
        }
        assert found == {"user": 403, "prometheus": 200, "nobody": 401}
        assert (await http.get("/health")).status_code == 200


async def test_a_dead_supervisor_restarts_nothing_and_fails_no_request(tmp_path: Path) -> None:
    async with fleets.running(fleets.write(tmp_path, ttft_s=0.1)) as (fleet, http):
        before, stop = await starts(fleet), asyncio.Event()
        codes: list[int] = []

        async def user() -> None:
            while not stop.is_set():
                codes.append((await chat(http)).status_code)

        users = [asyncio.create_task(user()) for _ in range(8)]
        stream = asyncio.create_task(fleets.events(http, max_tokens=200))
        helpers = {name: fleets.helper(fleet, name).pid for name in ("powerband.serve.router.picker", "envoy")}
        for _ in range(3):
            supervisor = fleet.status()["pid"]
            os.kill(supervisor, signal.SIGKILL)
            while fleet.status()["pid"] == supervisor:
                await asyncio.sleep(0.05)
        assert await starts(fleet) == before
        assert (await stream)[-1] == "[DONE]"
        victim = replicas(fleet)["golden-1"]
        os.kill(victim["pid"], signal.SIGKILL)  # the new supervisor watches what it adopted
        await back(fleet, victim)
        stop.set()
        await asyncio.gather(*users)
        assert set(codes) == {200}
        assert helpers == {name: fleets.helper(fleet, name).pid for name in helpers}
        everything = fleets.processes(fleet)
    for one in everything:
        if one.pid != os.getpid():
            assert not one.is_running() or one.status() == "zombie"
