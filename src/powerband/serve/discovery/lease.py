"""Leader election by a Lease of coordination.k8s.io: of several pickers one serves.

The holder renews the Lease; it leads until `renew_deadline_s` after the start of its last renewal. Another takes the
Lease once it has seen it unchanged for the longer `duration_s`. Only durations of each one's own monotonic clock are
compared, so clocks need not agree.

While nobody reaches the API server, nobody can take the Lease: its last holder goes on leading, so that an outage of
the control plane does not end the data plane. After an outage others wait a whole duration again before they take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from powerband.serve.discovery.api_server import ApiServer, Credentials, Watched

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
_OK, _CREATED, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _CONFLICT, _SERVER_ERROR = 200, 201, 401, 403, 404, 409, 500
_RETRY_FAILED_S = 0.2


@dataclass
class Lease:
    """One picker's part in the election."""

    credentials: Credentials
    namespace: str
    name: str
    identity: str
    duration_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _leads: bool = field(default=False, init=False)
    _renewed_at_s: float = field(default=0.0, init=False)  # start of the last renewal
    _unreachable_at_s: float | None = field(default=None, init=False)  # end of the last attempt, if it failed
    _record: dict[str, Any] = field(default_factory=dict, init=False)  # the Lease as we wrote it last
    _released: bool = field(default=False, init=False)
    _seen: tuple[Any, ...] | None = field(default=None, init=False)  # another's record
    _seen_at_s: float = field(default=0.0, init=False)
    _api: ApiServer | None = field(default=None, init=False)

    @property
    def renew_deadline_s(self) -> float:
        """Return how long a renewal lasts for its holder: less than for the others."""
        return 0.7 * self.duration_s

    @property
    def retry_s(self) -> float:
        """Return the time between two renewals."""
        return 0.2 * self.duration_s

    def held(self) -> bool:
        """Tell whether this picker leads now.

        Past the deadline it does only if it has just found that the API server cannot be reached.
        """
        now_s = self.clock()
        if self._released or not self._leads:
            return False
        found_at_s = self._unreachable_at_s
        return now_s < self._renewed_at_s + self.renew_deadline_s or (
            found_at_s is not None and now_s < found_at_s + 3 * self.retry_s
        )

    async def run(self, may_lead: Callable[[], bool]) -> None:
        """Take part in the election until released; `may_lead` tells whether this picker could serve."""
        changed = asyncio.Event()
        async with ApiServer(self.credentials) as api, asyncio.TaskGroup() as group:
            self._api = api
            path = _LEASES.format(self.namespace)
            others = Watched(api, path, changed.set, fieldSelector=f"metadata.name={self.name}")
            watching = group.create_task(others.run())
            while not self._released:
                changed.clear()
                wait_s = await (self._renew() if self._leads else self._follow(others, may_lead()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), wait_s)
            watching.cancel()

    async def _renew(self) -> float:
        """Renew the Lease if it is time; return the seconds until the next step at the latest."""
        if (left_s := self._renewed_at_s + self.retry_s - self.clock()) > 0:
            return left_s
        status = await self._write(self._record, self.identity)
        if status in (_CONFLICT, _NOT_FOUND):
            status, found = await self._send("GET", self._path)
            if status == _OK and _holder(found) not in (self.identity, ""):
                self._stop_leading(f"{_holder(found)} leads")
                return 0.0
            if status:
                self._record = found if status == _OK else {}
                status = await self._write(self._record, self.identity)
        return self.retry_s if status in (_OK, _CREATED) else _RETRY_FAILED_S

    async def _follow(self, others: Watched, may_lead: bool) -> float:
        """Watch the holder, and take the Lease when it has expired; return the seconds until the next step."""
        if not others.connected:
            self._seen = None  # an outage: the holder has a whole duration to renew it
            return self.retry_s
        found = others.objects.get(self.name, {})
        if (left_s := self._expires_in_s(found)) > 0:
            return left_s
        if not may_lead:
            return self.retry_s
        status, found = await self._send("GET", self._path)  # the server answers now, and nobody has renewed it
        if status not in (_OK, _NOT_FOUND):
            self._seen = None
            return self.retry_s
        found = found if status == _OK else {}
        if (left_s := self._expires_in_s(found)) > 0:
            return left_s
        if await self._write(found, self.identity) in (_OK, _CREATED):
            self._leads = True
            _say(f"{self.identity} leads")
            return self.retry_s
        return random.uniform(0.1, 0.3) * self.retry_s

    def _expires_in_s(self, found: Mapping[str, Any]) -> float:
        """Return how long another's record must still stay unchanged before it may be taken."""
        spec = found.get("spec", {})
        if (holder := _holder(found)) in (self.identity, ""):
            return 0.0
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at_s = seen, self.clock()
        lasts_s = max(self.duration_s, float(spec.get("leaseDurationSeconds") or 0))
        return self._seen_at_s + lasts_s - self.clock()

    def _stop_leading(self, why: str) -> None:
        self._leads, self._seen = False, None
        _say(f"{self.identity} does not lead any more: {why}")

    async def release(self) -> None:
        """Give the Lease up, so that the others need not wait."""
        led, self._released = self.held(), True
        if led:
            await self._write(self._record, "")

    @property
    def _path(self) -> str:
        return f"{_LEASES.format(self.namespace)}/{self.name}"

    async def _write(self, found: Mapping[str, Any], holder: str) -> int:
        """Write the Lease if nobody has written since `found`; return the status, 0 if there was no answer."""
        began_s, body = self.clock(), self._body(found, holder)
        if found:
            status, written = await self._send("PUT", self._path, body)
        else:
            status, written = await self._send("POST", _LEASES.format(self.namespace), body)
        if status in (_OK, _CREATED):
            self._renewed_at_s, self._record, self._unreachable_at_s = began_s, written, None
        elif not status:
            self._unreachable_at_s = self.clock()
        else:
            self._unreachable_at_s = None
        return status

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and object of a response; 0 if there was none, or the server cannot reach its own storage."""
        assert self._api is not None
        try:
            response = await self._api.request(method, path, body=body, timeout_s=self.retry_s)
            data: dict[str, Any] = response.json()
        except (httpx.HTTPError, OSError, ValueError):
            return 0, {}
        if response.status_code in (_UNAUTHORIZED, _FORBIDDEN):
            _say(f"error: lease {self.name}: {data.get('message')}")
        return (0 if response.status_code >= _SERVER_ERROR else response.status_code), data

    def _body(self, found: Mapping[str, Any], holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        old = found.get("spec", {})
        if found:
            metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        changes = holder != old.get("holderIdentity")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": max(1, round(self.duration_s)),
                "acquireTime": now if changes else old.get("acquireTime"),
                "renewTime": now,
                "leaseTransitions": (old.get("leaseTransitions") or 0) + (changes and bool(holder)),
            },
        }


def _holder(found: Mapping[str, Any]) -> str:
    return found.get("spec", {}).get("holderIdentity") or ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
