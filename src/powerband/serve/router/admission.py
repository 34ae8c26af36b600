"""Authentication, rate limits and usage of tenants."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from powerband.core.fleet import Tenant, Tenants
from powerband.errors import PowerbandError
from powerband.serve.router.requests import RequestRejected
from powerband.store import documents

ANONYMOUS = "anybody"  # the tenant of every request if the fleet has no tenants file
_PREFIX = "pb-"


def new_key() -> tuple[str, str]:
    """Return a new API key and its hash for tenants.yaml."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key: keys are long and random, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(slots=True)
class TenantUsage:
    """Requests, tokens and cost of one tenant, and its rate limiter (a token bucket)."""

    requests: int = 0
    rejected: int = 0
    running: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0
    _bucket: float | None = None  # requests allowed at _bucket_as_of_s
    _bucket_as_of_s: float = 0.0

    def acquire(self, tenant: Tenant, now_s: float) -> float:
        """Take one request from the rate limit and return 0, or return the seconds until one is available."""
        if tenant.rate_per_s is None:
            return 0.0
        if self._bucket is None:
            self._bucket, self._bucket_as_of_s = float(tenant.burst), now_s
        refilled = self._bucket + (now_s - self._bucket_as_of_s) * tenant.rate_per_s
        self._bucket, self._bucket_as_of_s = min(float(tenant.burst), refilled), now_s
        if self._bucket >= 1:
            self._bucket -= 1
            return 0.0
        return (1 - self._bucket) / tenant.rate_per_s


class Admission:
    """Authenticates requests and enforces the limits of tenants."""

    def __init__(self, tenants: Tenants | None) -> None:
        self.usage: dict[str, TenantUsage] = {}
        self.tenants: dict[str, Tenant] | None = None
        self.problem = ""  # why the tenants file could not be loaded
        self.load(tenants)

    def close(self) -> None:
        """Let nobody in until tenants are loaded."""
        self.tenants = {}

    def load(self, tenants: Tenants | None) -> None:
        """Replace the list of tenants; usage is kept."""
        self.tenants = tenants.tenants if tenants else None
        self._by_hash = {one.key_sha256: name for name, one in (self.tenants or {}).items()}

    def authenticate(self, authorization: str) -> str:
        """Return the tenant of an Authorization header; raise RequestRejected (401) if the key is unknown."""
        if self.tenants is None:
            return ANONYMOUS
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestRejected(401, "no API key: send the header 'Authorization: Bearer KEY'", code="key_missing")
        digest = hash_key(key.strip())
        name = self._by_hash.get(digest)
        if name is None or not hmac.compare_digest(self.tenants[name].key_sha256, digest):
            raise RequestRejected(401, "unknown API key", code="invalid_api_key")
        return name

    def allow_metrics(self, authorization: str) -> None:
        """Raise RequestRejected if the fleet has tenants and the key's tenant may not read the metrics."""
        name = self.authenticate(authorization)
        if (tenant := self.tenant(name)) and not tenant.metrics:
            raise RequestRejected(403, f"tenant {name} may not read the metrics", code="metrics_not_allowed")

    def tenant(self, name: str) -> Tenant | None:
        """Return a tenant's limits, or None if it has none."""
        return (self.tenants or {}).get(name)

    def usage_of(self, name: str) -> TenantUsage:
        """Return the usage of a tenant since the picker started."""
        return self.usage.setdefault(name, TenantUsage())

    def admit(self, name: str, model: str, now_s: float) -> TenantUsage:
        """Count one request of a tenant as running; raise RequestRejected if it exceeds a limit."""
        usage, tenant = self.usage_of(name), self.tenant(name)
        usage.requests += 1
        try:
            if tenant:
                if tenant.models and model not in tenant.models:
                    raise RequestRejected(403, f"tenant {name} may not use model {model}", code="model_not_allowed")
                if tenant.in_flight is not None and usage.running >= tenant.in_flight:
                    message = f"too many concurrent requests (limit {tenant.in_flight})"
                    raise RequestRejected(429, message, code="in_flight_limit", retry_after_s=1.0)
                if (wait_s := usage.acquire(tenant, now_s)) > 0:
                    message = f"too many requests (limit {tenant.rate_per_s:g} per second)"
                    raise RequestRejected(429, message, code="rate_limit", retry_after_s=wait_s)
        except RequestRejected:
            usage.rejected += 1
            raise
        usage.running += 1
        return usage


def load_tenants(admission: Admission, path: Path) -> None:
    """Replace the tenants; an invalid file changes nothing, and is reported until it is valid."""
    try:
        admission.load(documents.read_as(Tenants, path))
        admission.problem = ""
    except (PowerbandError, OSError) as error:
        message = error.message if isinstance(error, PowerbandError) else str(error)
        admission.problem = f"{path}: {message.splitlines()[0]}"
        print(f"error: tenants file not loaded: {admission.problem}", file=sys.stderr, flush=True)
