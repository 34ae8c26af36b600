"""Who asks, how much they may, and what they used."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from powerband.core.fleet import Tenant, Tenants
from powerband.serve.router.requests import Refused

ANYBODY = "anybody"
_PREFIX = "pb-"


def new_key() -> tuple[str, str]:
    """Return an API key, and the hash by which it is known."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hashed(key)


def hashed(key: str) -> str:
    """Return the hash of a key: it is long and random, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(slots=True)
class TenantUsage:
    """What a tenant used."""

    requests: int = 0
    refused: int = 0
    running: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0
    _allowance: float | None = None
    _as_of_s: float = 0.0

    def allowed_after_s(self, tenant: Tenant, now_s: float) -> float:
        """Return after how many seconds another request is within the rate, and count it where that is now."""
        if tenant.rate_per_s is None:
            return 0.0
        if self._allowance is None:
            self._allowance, self._as_of_s = float(tenant.burst), now_s
        grown = self._allowance + (now_s - self._as_of_s) * tenant.rate_per_s
        self._allowance, self._as_of_s = min(float(tenant.burst), grown), now_s
        if self._allowance >= 1:
            self._allowance -= 1
            return 0.0
        return (1 - self._allowance) / tenant.rate_per_s


class Admission:
    """Who comes in."""

    def __init__(self, tenants: Tenants | None) -> None:
        self.accounts: dict[str, TenantUsage] = {}
        self.admit(tenants)

    def admit(self, tenants: Tenants | None) -> None:
        """Take another list of tenants; accounts stay."""
        self.tenants = tenants.tenants if tenants else None
        self._by_hash = {one.key_sha256: name for name, one in (self.tenants or {}).items()}

    def known(self, authorization: str) -> str:
        """Return the tenant whose key it is, or refuse."""
        if self.tenants is None:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refused(401, "an API key is needed: 'Authorization: Bearer KEY'", code="key_missing")
        found = hashed(key.strip())
        name = self._by_hash.get(found)
        if name is None or not hmac.compare_digest(self.tenants[name].key_sha256, found):
            raise Refused(401, "the API key is not known", code="invalid_api_key")
        return name

    def tenant(self, name: str) -> Tenant | None:
        """Return a tenant's limits; None: there are none."""
        return (self.tenants or {}).get(name)

    def account(self, name: str) -> TenantUsage:
        """Return what a tenant used so far."""
        return self.accounts.setdefault(name, TenantUsage())

    def enter(self, name: str, model: str, now_s: float) -> TenantUsage:
        """Let one request in, or refuse it."""
        account, tenant = self.account(name), self.tenant(name)
        account.requests += 1
        try:
            if tenant:
                if tenant.models and model not in tenant.models:
                    raise Refused(403, f"{model} is not among the models of {name}", code="model_not_allowed")
                if tenant.in_flight is not None and account.running >= tenant.in_flight:
                    raise Refused(429, "too many requests at once", code="in_flight_limit", retry_after_s=1.0)
                if (wait := account.allowed_after_s(tenant, now_s)) > 0:
                    raise Refused(429, "too many requests per second", code="rate_limit", retry_after_s=wait)
        except Refused:
            account.refused += 1
            raise
        account.running += 1
        return account
