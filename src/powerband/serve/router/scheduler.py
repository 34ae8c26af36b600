"""Admission and routing: authenticate a request, queue it, and choose a replica, or reject it with 429."""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from powerband.core.fleet import PRIORITIES, Tenants
from powerband.core.prefix_hash import CHARS_PER_TOKEN, FINE_BLOCK_CHARS, block_hashes
from powerband.serve.router import requests
from powerband.serve.router.admission import ANONYMOUS, Admission, TenantUsage
from powerband.serve.router.pool import Endpoint, EndpointPool, QueuedRequest, RequestProfile
from powerband.serve.router.requests import Request, RequestRejected
from powerband.serve.router.retries import DIED, MAX_DEATHS, FailedAttempts, FailedDispatches, Quarantine, fingerprint
from powerband.serve.spec import ModelSpec

_MIN_RETRY_AFTER_S = 1.0
_MAX_QUEUE_TIMEOUT_S = 600.0
_SUSPENDED_S = 1.0  # of a replica whose request failed: by then the supervisor has noticed


@dataclass(eq=False, slots=True)
class RequestContext:
    """The state of one request in the picker, from admission to its end."""

    request_id: str
    tenant: str
    usage: TenantUsage
    model: ModelSpec
    queued: QueuedRequest
    pool: EndpointPool
    dispatched: asyncio.Future[QueuedRequest]
    overflowed: bool = False  # the fallback model serves it
    traceparent: str = ""  # the client's W3C header
    path: str = ""
    arrived_s: float = 0.0  # of the first dispatch, if an earlier one failed
    deaths: int = 0  # engines that ended while they had this request


@dataclass(frozen=True)
class RoutingDecision:
    """The replica that serves a request, and the addresses that Envoy tries in turn."""

    addresses: tuple[str, ...]
    replica: str
    recipe: str
    body: bytes | None  # None: forward the client's body unchanged


@dataclass
class RequestOutcome:
    """Status, tokens and timing of a finished request; times count from its arrival."""

    status: int
    output_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: float | None = None
    last_token_s: float | None = None
    e2e_s: float | None = None
    broken: bool = False  # the stream ended with an error event, or was cut
    retried: bool = False  # its replica failed before the first token, and Envoy sends it to the picker again

    def delayed(self, seconds: float) -> RequestOutcome:
        """Return the outcome with its times counted from an earlier arrival."""
        if seconds <= 0:
            return self
        times = (self.ttft_s, self.last_token_s, self.e2e_s)
        ttft_s, last_token_s, e2e_s = (None if one is None else one + seconds for one in times)
        return replace(self, ttft_s=ttft_s, last_token_s=last_token_s, e2e_s=e2e_s)

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time between tokens; None with fewer than two."""
        if self.ttft_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass
class RequestScheduler:
    """Admits, queues and routes the requests of all models of a fleet."""

    models: dict[str, ModelSpec]
    tenants: Tenants | None = None
    clock: Callable[[], float] = time.monotonic
    on_end: Callable[[RequestContext, RequestOutcome], None] = lambda *_: None
    capture: bool = False  # compute the fine prefix hashes that traffic capture records
    capture_text: bool = False  # keep the messages
    waits_for_replicas: bool = True  # False: without a ready replica a request is rejected with 503 at once
    pools: dict[str, EndpointPool] = field(default_factory=dict)
    contexts: dict[str, RequestContext] = field(default_factory=dict)  # by request id
    rejections: dict[str, int] = field(default_factory=dict)  # by reason
    overflows: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self.tenants)
        self.quarantine, self._failed = Quarantine(), FailedDispatches()
        self._by_queued: dict[QueuedRequest, RequestContext] = {}
        self.update_models(self.models)

    def update_models(self, models: dict[str, ModelSpec]) -> None:
        """Replace the specs of the models, for example after a rollout; pools and queues are kept."""
        self.models = models
        for name, one in models.items():
            if name not in self.pools:
                self.pools[name] = EndpointPool(one.typical_request, rate_per_s=one.rate_per_s, routing=one.routing)
        self._names = {alias: name for name, one in models.items() for alias in (name, *one.aliases, *one.adapters)}

    def update_endpoints(
        self, endpoints: Mapping[str, list[dict[str, Any]]], canary_weights: Mapping[str, float]
    ) -> None:
        """Replace the endpoints and canary weights of every pool, and dispatch what fits now."""
        for name, pool in self.pools.items():
            pool.canary_weight = canary_weights.get(name, 0.0)
            current = {one["name"]: one for one in endpoints.get(name, ())}
            for gone in set(pool.endpoints) - set(current):
                pool.remove(gone)
            for one in current.values():
                known = pool.endpoints.get(one["name"])
                if known is None or known.address != one["address"]:
                    pool.add(Endpoint(**one))
                else:
                    if one["ready"] and not known.ready:
                        known.suspended_until_s = 0.0  # the supervisor has seen it fail and come back
                    known.max_in_flight, known.ready, known.canary = one["max_in_flight"], one["ready"], one["canary"]
            pool.has_canaries = any(one.canary for one in pool.endpoints.values())
            self._dispatch(pool)

    async def pick(
        self,
        body: bytes,
        *,
        request_id: str,
        tenant: str,
        headers: Mapping[str, str],
        earlier: FailedAttempts | None = None,
        subset: frozenset[str] | None = None,
    ) -> RoutingDecision:
        """Wait for a free slot and return the routing decision; raise RequestRejected if there is none in time.

        `earlier` has the dispatches of this request that failed, `subset` the addresses that its gateway allows.
        """
        request = requests.read(body)
        name = self._names.get(request.model)
        if name is None:
            raise RequestRejected(404, f"there is no model {request.model}", code="model_not_found")
        model, now_s = self.models[name], self.clock()
        self._check_deadly(body, name, earlier, now_s)
        if earlier:
            usage = self.admission.usage_of(tenant)  # was admitted before
            usage.running += 1
        else:
            usage = self.admission.admit(tenant, request.model if request.model in model.adapters else name, now_s)
        try:
            context = self._enqueue(request_id, request, model, tenant, usage, headers, now_s, earlier, subset)
        except RequestRejected:
            usage.running -= 1
            usage.rejected += 1
            raise
        self._dispatch(context.pool)
        try:
            await context.dispatched
        except BaseException:
            self._drop(context)
            raise
        endpoint = context.queued.endpoint
        assert endpoint is not None
        fallbacks = context.pool.fallback_endpoints(context.queued, now_s)
        renamed = request.model not in (context.model.name, *context.model.adapters)
        return RoutingDecision(
            addresses=tuple(one.address for one in (endpoint, *fallbacks)),
            replica=endpoint.name,
            recipe=endpoint.recipe + (" (overflow)" if context.overflowed else ""),
            body=_with_model(body, context.model.name) if renamed else None,
        )

    def _enqueue(
        self,
        request_id: str,
        request: Request,
        model: ModelSpec,
        tenant: str,
        usage: TenantUsage,
        headers: Mapping[str, str],
        now_s: float,
        earlier: FailedAttempts | None,
        subset: frozenset[str] | None,
    ) -> RequestContext:
        """Queue a request for its model, or for the fallback, if the predicted wait is within its timeout.

        A request for a model without ready replicas and without a fallback is queued too, if the scheduler waits for
        replicas: one may become ready.
        """
        priority = self._priority(tenant, headers)
        queue_timeout_s = _queue_timeout_s(headers, model.queue_timeout_s)
        blocks = tuple(block_hashes(request.text))
        fine_blocks = tuple(block_hashes(request.text, FINE_BLOCK_CHARS)) if self.capture else ()
        waits_s = []
        for chosen in filter(None, (model, self.models.get(model.fallback))):
            pool = self.pools[chosen.name]
            if subset is not None and not any(one.ready for one in pool.subset(subset)):
                continue
            waits_s.append(wait_s := pool.predicted_wait_s(priority, now_s))
            may_wait = self.waits_for_replicas and chosen is model and not model.fallback
            if wait_s <= queue_timeout_s or (math.isinf(wait_s) and may_wait):
                expected_tokens = chosen.output_tokens
                if request.max_tokens is not None:
                    expected_tokens = min(request.max_tokens, expected_tokens)
                profile = RequestProfile(
                    prompt_tokens=len(request.text) / CHARS_PER_TOKEN,
                    output_tokens=expected_tokens,
                    blocks=blocks,
                    fine_blocks=fine_blocks,
                    messages=request.messages if self.capture_text else (),
                    priority=priority,
                    queue_timeout_s=queue_timeout_s,
                    adapter=request.model if request.model in chosen.adapters else "",
                    turns=request.turns,
                    subset=subset,
                )
                context = RequestContext(
                    request_id,
                    tenant,
                    usage,
                    chosen,
                    pool.enqueue(profile, now_s, exclusive=bool(earlier and earlier.deaths)),
                    pool,
                    asyncio.get_running_loop().create_future(),
                    overflowed=chosen is not model,
                    traceparent=headers.get("traceparent", ""),
                    path=headers.get(":path", ""),
                    arrived_s=earlier.arrived_s if earlier else now_s,
                    deaths=earlier.deaths if earlier else 0,
                )
                self.contexts[request_id] = self._by_queued[context.queued] = context
                self.overflows += context.overflowed
                self.pools[model.name].turned_away += context.overflowed
                return context
        self.pools[model.name].turned_away += 1
        wait_s = min(waits_s, default=math.inf)
        if math.isinf(wait_s) and not self.waits_for_replicas:
            raise self._no_replica(subset)
        predicted = f"predicted wait {round(wait_s, 2):g} s" if math.isfinite(wait_s) else "no replica is ready"
        self._count_rejection("overload")
        raise _no_capacity(
            predicted,
            queue_timeout_s,
            retry_after_s=wait_s - queue_timeout_s if math.isfinite(wait_s) else _MIN_RETRY_AFTER_S,
        )

    def _no_replica(self, subset: frozenset[str] | None) -> RequestRejected:
        self._count_rejection("no_replica")
        found = "no replica is ready" if subset is None else f"none of the {len(subset)} allowed replicas is ready"
        return RequestRejected(503, found, code="no_replica", retry_after_s=_MIN_RETRY_AFTER_S)

    def any_endpoint(self, subset: frozenset[str] | None) -> RoutingDecision:
        """Return the least busy replica of any model, for a request that is neither queued nor accounted for."""
        ready = [
            one
            for pool in self.pools.values()
            for one in (pool.endpoints.values() if subset is None else pool.subset(subset))
            if one.is_able(self.clock())
        ]
        if not ready:
            raise self._no_replica(subset)
        first, *others = heapq.nsmallest(3, ready, key=lambda one: one.running + one.others)
        return RoutingDecision((first.address, *(one.address for one in others)), first.name, first.recipe, None)

    def served_by(self, request_id: str, address: str) -> Endpoint | None:
        """Account for a dispatched request at the fallback that answers it, and return it; None: as chosen.

        The chosen one is kept out for a moment: the gateway tried it first, and in vain.
        """
        context = self.contexts.get(request_id)
        if context is None or (chosen := context.queued.endpoint) is None or chosen.address == address:
            return None
        now_s = self.clock()
        chosen.suspended_until_s = now_s + _SUSPENDED_S
        for served in context.pool.subset((address,)):
            context.pool.move(context.queued, served, now_s)
            return served
        return None

    def _priority(self, tenant: str, headers: Mapping[str, str]) -> int:
        """Return the tenant's priority, or the lower one that the request's header asks for."""
        limits = self.admission.tenant(tenant)
        highest = PRIORITIES.index(limits.priority) if limits else 0
        requested = headers.get("x-powerband-priority", "")
        if requested in PRIORITIES:
            return max(highest, PRIORITIES.index(requested))
        return highest if limits else PRIORITIES.index("normal")

    def _dispatch(self, pool: EndpointPool) -> None:
        """Release the waiting requests for which there is a free slot."""
        for queued in pool.dispatch(self.clock()):
            context = self._by_queued[queued]
            if not context.dispatched.done():
                context.dispatched.set_result(queued)

    def expire(self) -> None:
        """Reject the queued requests whose timeout has passed; dispatch to replicas that are suspended no more."""
        now_s = self.clock()
        for pool in self.pools.values():
            if pool.waiting:
                self._dispatch(pool)
            for queued in pool.pop_expired(now_s):
                context = self._by_queued[queued]
                self._count_rejection("deadline")
                if not context.dispatched.done():
                    waited = f"waited {round(now_s - queued.arrived_s, 2):g} s"
                    context.dispatched.set_exception(
                        _no_capacity(waited, queued.profile.queue_timeout_s, retry_after_s=_MIN_RETRY_AFTER_S)
                    )

    def finish(self, request_id: str, outcome: RequestOutcome) -> None:
        """Account for a finished or aborted request and free its slot; cancel it if it is still queued."""
        context = self.contexts.get(request_id)
        if context is None:
            return
        if context.queued.endpoint is None:
            self._drop(context)
            context.dispatched.cancel()
            return
        if outcome.retried:
            self._failed.add(request_id, self._fail(context), self.clock())
            return
        del self.contexts[request_id]
        self._by_queued.pop(context.queued, None)
        outcome = outcome.delayed(context.queued.arrived_s - context.arrived_s)  # by failed dispatches
        output_tokens = outcome.output_tokens if outcome.status == 200 else None
        context.pool.finish(context.queued, self.clock(), output_tokens=output_tokens)
        usage = context.usage
        usage.running -= 1
        prompt_tokens = outcome.prompt_tokens or round(context.queued.profile.prompt_tokens)
        billed_tokens = (prompt_tokens if outcome.status == 200 else 0) + outcome.output_tokens
        usage.prompt_tokens += prompt_tokens
        usage.output_tokens += outcome.output_tokens
        usage.usd += billed_tokens * context.model.usd_per_1m_tokens / 1e6
        self.on_end(context, outcome)
        self._dispatch(context.pool)

    def retry(self, request_id: str, path: str) -> FailedAttempts | None:
        """Return the failed request that Envoy sends again with the path of its redirect; None: it is a new request."""
        context = self.contexts.get(request_id)
        failed = self._fail(context) if context and context.queued.endpoint else self._failed.take(request_id)
        if failed is None:
            return None
        return replace(failed, deaths=failed.deaths + (path == DIED))

    def _fail(self, context: RequestContext) -> FailedAttempts:
        """Free the slot of a request whose replica failed, and keep the replica out until the supervisor knows."""
        endpoint = context.queued.endpoint
        assert endpoint is not None
        del self.contexts[context.request_id]
        self._by_queued.pop(context.queued, None)
        context.pool.finish(context.queued, self.clock())
        context.usage.running -= 1
        endpoint.suspended_until_s = self.clock() + _SUSPENDED_S
        self._dispatch(context.pool)
        return FailedAttempts(context.tenant, context.path, context.arrived_s, endpoint.recipe, context.deaths)

    def _check_deadly(self, body: bytes, model: str, earlier: FailedAttempts | None, now_s: float) -> None:
        """Reject a request that ended two engines, and for a while each request with the same body."""
        deaths = earlier.deaths if earlier else 0
        if deaths < MAX_DEATHS and not self.quarantine:
            return
        key = fingerprint(body, model)
        if deaths >= MAX_DEATHS:
            self.quarantine.add(key, now_s)
            raise RequestRejected(
                422, f"{deaths} engines ended while they had this request; it is not tried again", code="engine_died"
            )
        if self.quarantine.holds(key, now_s):
            message = "a request with this body ended several engines a short time ago; it is not tried again"
            raise RequestRejected(422, message, code="quarantined")

    def fail_in_flight(self) -> None:
        """Finish all dispatched requests as failed: Envoy is gone and cannot report their end."""
        for name in [name for name, one in self.contexts.items() if one.queued.endpoint is not None]:
            self.finish(name, RequestOutcome(status=0))

    def _drop(self, context: RequestContext) -> None:
        """Forget a request whose client is gone or that was rejected."""
        if self.contexts.pop(context.request_id, None) is None:  # finished already
            return
        context.pool.cancel(context.queued)
        if context.queued.endpoint is not None:  # dispatched at the same moment
            context.pool.finish(context.queued, self.clock())
        context.usage.running -= 1
        context.usage.rejected += 1
        self._by_queued.pop(context.queued, None)
        self._dispatch(context.pool)

    def _count_rejection(self, reason: str) -> None:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1

    def healthy(self) -> bool:
        """Tell whether every model has a ready replica."""
        return all(any(one.ready for one in pool.endpoints.values()) for pool in self.pools.values())

    def model_names(self, tenant: str) -> Iterator[str]:
        """Yield the model names, aliases and adapters that a tenant may use."""
        limits = self.admission.tenant(tenant) if tenant != ANONYMOUS else None
        for alias, name in self._names.items():
            if not limits or not limits.models or name in limits.models:
                yield alias


def _no_capacity(found: str, limit_s: float, *, retry_after_s: float) -> RequestRejected:
    message = f"no capacity before the deadline ({found}, limit {round(limit_s, 2):g} s)"
    return RequestRejected(429, message, code="overloaded", retry_after_s=max(_MIN_RETRY_AFTER_S, retry_after_s))


def _queue_timeout_s(headers: Mapping[str, str], default_s: float) -> float:
    try:
        requested_s = float(headers.get("x-powerband-patience-s", ""))
    except ValueError:
        return default_s
    return min(max(requested_s, 0.0), _MAX_QUEUE_TIMEOUT_S) if math.isfinite(requested_s) else default_s


def _with_model(body: bytes, model: str) -> bytes:
    return json.dumps({**json.loads(body), "model": model}).encode()
