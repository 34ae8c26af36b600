"""Leader election with the time passed in, and an API server that is up, away, or has another holder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx

from powerband.serve.discovery.api_server import Credentials
from powerband.serve.discovery.lease import Lease


class Server:
    """The one Lease of an API server, with optimistic locking; `away` answers nothing."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {}
        self.version = 0
        self.away = False

    async def request(self, method: str, path: str, *, body: Any = None, timeout_s: float) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("refused")
        if method == "GET":
            return httpx.Response(200, json=self.lease) if self.lease else httpx.Response(404, json={})
        if (method == "POST") == bool(self.lease):
            return httpx.Response(409 if self.lease else 404, json={})
        if method == "PUT" and body["metadata"]["resourceVersion"] != str(self.version):
            return httpx.Response(409, json={})
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return httpx.Response(201 if method == "POST" else 200, json=self.lease)


class Election:
    """Pickers that share a server and a clock."""

    def __init__(self, *names: str) -> None:
        self.now_s, self.server = 100.0, Server()
        self.leases = [
            Lease(Credentials("http://x"), "default", "l", name, duration_s=5.0, clock=lambda: self.now_s)
            for name in names
        ]
        for one in self.leases:
            one._api = self.server  # type: ignore[assignment]

    async def step(self, one: Lease) -> float:
        objects = {"l": self.server.lease} if self.server.lease else {}
        others = SimpleNamespace(connected=not self.server.away, objects=objects)
        return await (one._renew() if one._leads else one._follow(others, True))  # type: ignore[arg-type]

    async def run(self, seconds: float, *, frozen: Lease | None = None) -> None:
        """Let all take their steps every 0.1 s, and check that at most one leads."""
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for one in self.leases:
                if one is not frozen:
                    await self.step(one)
            assert len(self.leading) <= 1, self.leading

    @property
    def leading(self) -> list[str]:
        return [one.identity for one in self.leases if one.held()]


async def test_one_leads_and_keeps_leading() -> None:
    found = Election("a", "b", "c")
    await found.run(30)
    assert found.leading == ["a"] and found.server.lease["spec"]["leaseTransitions"] == 1


async def test_another_leads_after_the_duration_and_a_frozen_leader_not_any_more() -> None:
    found = Election("a", "b")
    await found.run(2)
    first = found.leases[0]
    await found.run(4, frozen=first)
    assert found.leading == []  # its own deadline is earlier than the others'
    await found.run(1.5, frozen=first)
    assert found.leading == ["b"]
    await found.run(10)
    assert found.leading == ["b"] and not first._leads


async def test_a_released_lease_is_taken_at_once() -> None:
    found = Election("a", "b")
    await found.run(2)
    await found.leases[0].release()
    assert found.leading == []
    await found.step(found.leases[1])
    assert found.leading == ["b"]


async def test_while_the_server_is_away_the_leader_leads_and_gets_its_time_back() -> None:
    found = Election("a", "b")
    await found.run(2)
    found.server.away = True
    await found.run(60)
    assert found.leading == ["a"]
    found.server.away = False
    await found.step(found.leases[1])  # the follower is first to reach it
    await found.run(10)
    assert found.leading == ["a"]


async def test_a_leader_frozen_during_an_outage_does_not_lead_when_it_wakes() -> None:
    found = Election("a", "b")
    await found.run(2)
    found.server.away = True
    await found.run(10)
    first = found.leases[0]
    await found.run(5, frozen=first)
    assert not first.held()
    found.server.away = False
    await found.run(6, frozen=first)
    assert found.leading == ["b"]
    await found.run(3)
    assert found.leading == ["b"]


async def test_a_write_that_was_not_answered_is_found_by_its_holder() -> None:
    found = Election("a", "b")
    await found.run(2)
    found.server.version += 1  # as if a renewal arrived whose answer was lost
    found.server.lease["metadata"]["resourceVersion"] = str(found.server.version)
    await found.run(5)
    assert found.leading == ["a"]


async def test_who_cannot_serve_does_not_lead() -> None:
    found = Election("a")
    others = SimpleNamespace(connected=True, objects={})
    await found.leases[0]._follow(others, False)  # type: ignore[arg-type]
    assert found.leading == []
