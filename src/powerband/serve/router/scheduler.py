"""The picker's decisions about one request after another: who asks, for which pool, now, later or not at all."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from powerband.core.fleet import CLASSES, Tenants
from powerband.core.prefix_hash import CHARACTERS_PER_TOKEN, FINE, block_hashes
from powerband.serve.router import requests
from powerband.serve.router.admission import ANYBODY, Admission, TenantUsage
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile
from powerband.serve.router.requests import Refused, Request
from powerband.serve.spec import ModelSpec

_SOON_S = 1.0  # the shortest Retry-After


@dataclass(eq=False, slots=True)
class RequestContext:
    """One request at the desk."""

    name: str
    tenant: str
    account: TenantUsage
    model: ModelSpec
    ticket: QueuedRequest
    pool: EndpointPool
    sent: asyncio.Future[QueuedRequest]
    overflowed: bool = False
    parent: str = ""  # the client's own trace, as it was given


@dataclass(frozen=True)
class RoutingDecision:
    """Where a request goes."""

    addresses: tuple[str, ...]
    replica: str
    recipe: str
    body: bytes | None  # None: as it came


@dataclass
class RequestOutcome:
    """What is told of an answer when it is over."""

    status: int
    output_tokens: int = 0
    prompt_tokens: int = 0
    first_s: float | None = None  # since it came, to the first piece of the answer
    last_s: float | None = None  # and to the last
    total_s: float | None = None

    @property
    def pace_s(self) -> float | None:
        """Return the time between two tokens, on average; None where there are not two."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass
class RequestScheduler:
    """All pools of a fleet, behind one door."""

    parts: dict[str, ModelSpec]
    tenants: Tenants | None = None
    clock: Callable[[], float] = time.monotonic
    on_end: Callable[[RequestContext, RequestOutcome], None] = lambda *_: None
    noting: bool = False  # what the traffic looks like
    noting_text: bool = False
    pools: dict[str, EndpointPool] = field(default_factory=dict)
    cases: dict[str, RequestContext] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    overflows: int = 0

    def __post_init__(self) -> None:
        self.door = Admission(self.tenants)
        for name, part in self.parts.items():
            self.pools[name] = EndpointPool(part.usual, rate_per_s=part.rate_per_s, routing=part.routing)
        self._by_ticket: dict[QueuedRequest, RequestContext] = {}
        self.serve(self.parts)

    def serve(self, parts: dict[str, ModelSpec]) -> None:
        """Take what is promised and charged now; a recipe may have come in the place of another."""
        self.parts = parts
        self._names = {said: name for name, part in parts.items() for said in (name, *part.aliases, *part.adapters)}

    def backends(self, wanted: Mapping[str, list[dict[str, Any]]], shares: Mapping[str, float]) -> None:
        """Take the replicas as they are now, and the share of requests that goes to a recipe on trial."""
        for name, pool in self.pools.items():
            pool.share = shares.get(name, 0.0)
            there = {one["name"]: one for one in wanted.get(name, ())}
            for gone in set(pool.backends) - set(there):
                pool.remove(gone)
            for one in there.values():
                known = pool.backends.get(one["name"])
                if known is None or known.address != one["address"]:
                    pool.add(Endpoint(**one))
                else:
                    known.most, known.ready, known.canary = one["most"], one["ready"], one["canary"]
            self._send(pool)

    async def pick(self, body: bytes, *, case: str, tenant: str, headers: Mapping[str, str]) -> RoutingDecision:
        """Return where a request goes, once there is a place for it; or refuse it."""
        asked = requests.read(body)
        name = self._names.get(asked.model)
        if name is None:
            raise Refused(404, f"there is no model {asked.model}", code="model_not_found")
        part, now_s = self.parts[name], self.clock()
        account = self.door.enter(tenant, asked.model if asked.model in part.adapters else name, now_s)
        try:
            own = self._admitted(case, asked, part, tenant, account, headers, now_s)
        except Refused:
            account.running -= 1
            account.refused += 1
            raise
        self._send(own.pool)
        try:
            await own.sent
        except BaseException:
            self._drop(own)
            raise
        backend = own.ticket.backend
        assert backend is not None
        others = own.pool.others(own.ticket, now_s)
        renamed = asked.model not in (own.model.name, *own.model.adapters)
        return RoutingDecision(
            addresses=tuple(one.address for one in (backend, *others)) * 2,  # who died is back by the second time
            replica=backend.name,
            recipe=backend.recipe + (" (overflow)" if own.overflowed else ""),
            body=_renamed(body, own.model.name) if renamed else None,
        )

    def _admitted(
        self,
        name: str,
        asked: Request,
        part: ModelSpec,
        tenant: str,
        account: TenantUsage,
        headers: Mapping[str, str],
        now_s: float,
    ) -> RequestContext:
        """Put a request into the queue that can serve it in time."""
        priority = self._priority(tenant, headers)
        queue_timeout_s = _patience(headers, part.queue_timeout_s)
        blocks = tuple(block_hashes(asked.text))
        fine = tuple(block_hashes(asked.text, FINE)) if self.noting else ()
        waits = []
        for model in filter(None, (part, self.parts.get(part.fallback))):
            pool = self.pools[model.name]
            waits.append(wait_s := pool.wait_s(priority, now_s))
            if wait_s <= queue_timeout_s or (math.isinf(wait_s) and model is part and not model.fallback):
                usual = model.usual.output_tokens
                ask = RequestProfile(
                    prompt_tokens=len(asked.text) / CHARACTERS_PER_TOKEN,
                    output_tokens=usual if asked.most_tokens is None else min(asked.most_tokens, usual),
                    blocks=blocks,
                    fine=fine,
                    messages=asked.messages if self.noting_text else (),
                    priority=priority,
                    queue_timeout_s=queue_timeout_s,
                    adapter=asked.model if asked.model in model.adapters else "",
                    turns=asked.turns,
                )
                ticket = pool.enter(ask, now_s)
                future = asyncio.get_running_loop().create_future()
                overflowed, parent = model is not part, headers.get("traceparent", "")
                case = RequestContext(name, tenant, account, model, ticket, pool, future, overflowed, parent)
                self.cases[case.name] = self._by_ticket[ticket] = case
                self.overflows += case.overflowed
                return case
        longer_s = min(waits) - queue_timeout_s
        self._count("overload")
        raise Refused(
            429,
            "it cannot be answered in time",
            code="overloaded",
            retry_after_s=max(_SOON_S, longer_s if math.isfinite(longer_s) else _SOON_S),
        )

    def _priority(self, tenant: str, headers: Mapping[str, str]) -> int:
        """Return the class: the tenant's, or a lower one that it asks for itself."""
        known = self.door.tenant(tenant)
        own = CLASSES.index(known.priority) if known else 0
        asked = headers.get("x-powerband-priority", "")
        if asked in CLASSES:
            return max(own, CLASSES.index(asked))
        return own if known else CLASSES.index("normal")

    def _send(self, pool: EndpointPool) -> None:
        """Let whoever has a place go on."""
        for ticket in pool.dispatch(self.clock()):
            case = self._by_ticket[ticket]
            if not case.sent.done():
                case.sent.set_result(ticket)

    def expire(self) -> None:
        """Refuse those that have waited for too long."""
        now_s = self.clock()
        for pool in self.pools.values():
            for ticket in pool.expired(now_s):
                case = self._by_ticket[ticket]
                self._count("deadline")
                if not case.sent.done():
                    case.sent.set_exception(
                        Refused(429, "nobody was free in time", code="overloaded", retry_after_s=_SOON_S)
                    )

    def end(self, name: str, ended: RequestOutcome) -> None:
        """An answer is over, or was given up, or nobody waits for it any more."""
        case = self.cases.get(name)
        if case is None:
            return
        if case.ticket.backend is None:
            self._drop(case)
            case.sent.cancel()
            return
        del self.cases[name]
        self._by_ticket.pop(case.ticket, None)
        counted = ended.output_tokens if ended.status == 200 else None
        case.pool.finish(case.ticket, self.clock(), output_tokens=counted)
        account = case.account
        account.running -= 1
        account.prompt_tokens += ended.prompt_tokens or round(case.ticket.ask.prompt_tokens)
        account.output_tokens += ended.output_tokens
        account.usd += ended.output_tokens * case.model.usd_per_1m_tokens / 1e6
        self.on_end(case, ended)
        self._send(case.pool)

    def abandon(self) -> None:
        """Nobody will tell any more how what was sent on ended."""
        for name in [name for name, case in self.cases.items() if case.ticket.backend is not None]:
            self.end(name, RequestOutcome(status=0))

    def _drop(self, case: RequestContext) -> None:
        """Nobody waits for it any more."""
        if self.cases.pop(case.name, None) is None:  # as was told before
            return
        case.pool.leave(case.ticket)
        if case.ticket.backend is not None:  # it was sent on at the same moment
            case.pool.finish(case.ticket, self.clock())
        case.account.running -= 1
        case.account.refused += 1
        self._by_ticket.pop(case.ticket, None)
        self._send(case.pool)

    def _count(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def healthy(self) -> bool:
        """Tell whether every model has a replica that answers."""
        return all(any(one.ready for one in pool.backends.values()) for pool in self.pools.values())

    def models(self, tenant: str) -> Iterator[str]:
        """Return the names that a tenant may ask for."""
        known = self.door.tenant(tenant) if tenant != ANYBODY else None
        for alias, name in self._names.items():
            if not known or not known.models or name in known.models:
                yield alias


def _patience(headers: Mapping[str, str], usual_s: float) -> float:
    try:
        asked = float(headers.get("x-powerband-patience-s", ""))
    except ValueError:
        return usual_s
    return min(max(asked, 0.0), 600.0) if math.isfinite(asked) else usual_s


def _renamed(body: bytes, model: str) -> bytes:
    return json.dumps({**json.loads(body), "model": model}).encode()
