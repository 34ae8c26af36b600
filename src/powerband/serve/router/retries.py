"""Requests whose replica failed before their first token: Envoy sends them to the picker again.

A relay answers such a request with a redirect, and Envoy then asks the picker as for a new request. The picker counts
the engines that ended while they had the request: after the first it gets a replica of its own, after the second it
is rejected, and so is each request with the same body for a while.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

DIED = "/died"  # path of the redirect if the engine ended; see _relay.c
UNAVAILABLE = "/unavailable"  # path if the engine refused the connection or hangs
MAX_DEATHS = 2
_QUARANTINE_S, _MAX_QUARANTINED = 600.0, 10_000
_FORGOTTEN_S, _MAX_FAILED = 60.0, 10_000  # Envoy repeats a request at once, or never: its client is gone


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """What is kept of a request from its dispatches that failed."""

    tenant: str
    path: str
    arrived_s: float
    recipe: str  # of the last replica
    deaths: int  # engines that ended while they had the request


def fingerprint(body: bytes, model: str) -> bytes:
    """Return a hash of a request body that does not depend on the alias of its model."""
    data = {**json.loads(body), "model": model}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).digest()


@dataclass
class Quarantine:
    """Fingerprints of the requests that ended two engines."""

    _until_s: dict[bytes, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, key: bytes, now_s: float) -> None:
        """Reject requests with this fingerprint for ten minutes."""
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + _QUARANTINE_S
        while len(self._until_s) > _MAX_QUARANTINED or next(iter(self._until_s.values())) < now_s:
            del self._until_s[next(iter(self._until_s))]

    def holds(self, key: bytes, now_s: float) -> bool:
        """Return whether requests with this fingerprint are rejected."""
        return self._until_s.get(key, now_s) > now_s


@dataclass
class FailedDispatches:
    """Failed requests by request id, until Envoy sends them again."""

    _waiting: dict[str, tuple[float, FailedAttempts]] = field(default_factory=dict)

    def add(self, request_id: str, failed: FailedAttempts, now_s: float) -> None:
        """Keep a request for a minute."""
        self._waiting[request_id] = (now_s, failed)
        while len(self._waiting) > _MAX_FAILED or next(iter(self._waiting.values()))[0] < now_s - _FORGOTTEN_S:
            del self._waiting[next(iter(self._waiting))]

    def take(self, request_id: str) -> FailedAttempts | None:
        """Return a failed request, once."""
        found = self._waiting.pop(request_id, None)
        return found[1] if found else None
