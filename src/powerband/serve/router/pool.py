"""The endpoints of one model and its request queue: priorities, deadlines, and the choice of a replica.

Nothing here waits or reads a clock: callers pass the current time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from powerband.core.fleet import Routing
from powerband.core.prefix_hash import BLOCK_CHARS, CHARS_PER_TOKEN
from powerband.serve.router.prefix_index import PrefixIndex, matched

# Work is counted in units of one prompt token. Only the ratios matter: each pool learns its seconds per unit.
_OUTPUT_TOKEN_WORK = 4.0  # an output token costs about as much as this many prompt tokens
_ADAPTER_LOAD_WORK = 200.0  # loading an adapter that a replica does not hold
_LEARNING_RATE = 0.1  # weight of each finished request in the moving averages
_FALLBACKS = 2  # other endpoints for Envoy's own retries
_MAX_COMPARED = 32  # endpoints that are compared for a request; larger pools are sampled


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """The properties of a request that determine its queueing and routing."""

    prompt_tokens: float
    output_tokens: float  # expected
    blocks: tuple[int, ...] = ()  # prefix hashes
    fine_blocks: tuple[int, ...] = ()  # prefix hashes of smaller blocks, if traffic is captured
    messages: tuple[tuple[str, str], ...] = ()  # role and content, if text is captured
    priority: int = 1  # the lowest number is served first
    queue_timeout_s: float = math.inf
    adapter: str = ""
    turns: int = 1
    subset: frozenset[str] | None = None  # addresses that the gateway allows; None: all

    @property
    def work_estimate(self) -> float:
        """Return the estimated work without prefix-cache hits."""
        return self.prompt_tokens + _OUTPUT_TOKEN_WORK * self.output_tokens


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from its arrival to its end."""

    number: int
    profile: RequestProfile
    arrived_s: float
    endpoint: Endpoint | None = None  # None until it is dispatched
    started_s: float = 0.0
    in_flight_s_at_start: float = 0.0  # the endpoint's in_flight_s when this request started
    work_estimate: float = 0.0  # without the prompt tokens in the prefix cache
    done: bool = False  # cancelled, expired or finished


@dataclass(slots=True, eq=False)
class Endpoint:
    """A replica as the picker sees it."""

    name: str
    address: str
    max_in_flight: int
    ready: bool = True
    recipe: str = ""
    canary: bool = False
    removed: bool = False  # from the pool
    running: int = 0
    others: int = 0  # requests that the engine has from elsewhere, by its own gauges
    in_flight_s: float = 0.0  # integral of `running` over time
    dispatched: int = 0
    adapters: set[str] = field(default_factory=set)
    reserved_for: QueuedRequest | None = None  # runs alone, here
    suspended_until_s: float = 0.0  # after a failure that the supervisor may not have seen yet
    _work: float = 0.0  # outstanding at _work_as_of_s
    _work_as_of_s: float = 0.0
    _running_since_s: float = 0.0

    @property
    def free_slots(self) -> int:
        """Return how many more requests may be sent to the replica."""
        return self.max_in_flight - self.running - self.others

    def is_able(self, now_s: float) -> bool:
        """Return whether the replica can take a request, once it has a free slot."""
        return self.ready and now_s >= self.suspended_until_s

    def change_running(self, delta: int, now_s: float) -> None:
        """Add `delta` to the number of running requests."""
        self.in_flight_s += self.running * (now_s - self._running_since_s)
        self._running_since_s = now_s
        self.running += delta

    def remaining_work(self, now_s: float, seconds_per_unit: float) -> float:
        """Estimate the outstanding work, assuming the pool's learned speed."""
        done = (now_s - self._work_as_of_s) / seconds_per_unit
        return max(0.0, self._work - done)

    def add_work(self, work: float, now_s: float, seconds_per_unit: float) -> None:
        """Add work to the estimate; a negative amount removes work."""
        self._work = max(0.0, self.remaining_work(now_s, seconds_per_unit) + work)
        self._work_as_of_s = now_s


_Queue = list[tuple[int, int, QueuedRequest]]  # a heap of priority, number, request


class EndpointPool:
    """The replicas of one model and the queue of requests for them."""

    def __init__(
        self,
        typical: RequestProfile,
        *,
        rate_per_s: float | None = None,
        routing: Routing = "prefix",
    ) -> None:
        self.routing = routing
        self.endpoints: dict[str, Endpoint] = {}
        self._by_address: dict[str, Endpoint] = {}
        self._sampled: list[Endpoint] = []  # the same, to draw from
        self.has_canaries = False
        self._random = random.Random(0)
        self.prefixes = PrefixIndex[Endpoint]()
        self.seconds_per_unit = 1.0 / (rate_per_s * typical.work_estimate) if rate_per_s else 0.001  # per replica
        self._typical_work = typical.work_estimate  # moving average over requests
        self._running_by_priority: Counter[int] = Counter()
        self.arrived = self._dispatched = self._dispatched_to_canaries = 0
        self.turned_away = 0  # requests that were not queued: rejected at once, or sent to the fallback
        self.expired = 0  # requests whose queue timeout passed
        self.canary_weight = 0.0  # share of the requests that canaries receive
        self._queues: dict[frozenset[str] | None, _Queue] = {None: []}  # by the addresses that its requests may have
        self._exclusive: list[QueuedRequest] = []  # they may have ended an engine: each gets a replica of its own
        self._queued_work: dict[int, float] = {}  # by priority
        self._deadlines: list[tuple[float, int, QueuedRequest]] = []
        self._numbers = itertools.count(1)

    @property
    def depth(self) -> int:
        """Return the number of queued requests."""
        queued = [one for queue in self._queues.values() for _, _, one in queue]
        return sum(not one.done for one in (*queued, *self._exclusive))

    @property
    def waiting(self) -> bool:
        """Return whether a request may be queued."""
        return bool(self._exclusive) or any(self._queues.values())

    @property
    def running(self) -> int:
        """Return the number of dispatched, unfinished requests."""
        return sum(one.running for one in self.endpoints.values())

    def predicted_wait_s(self, priority: int, now_s: float) -> float:
        """Return the predicted queueing time of a new request; infinite if no replica is ready."""
        queue_is_empty = not any(self._queues.values())
        if queue_is_empty and any(one.free_slots > 0 and one.ready and not one.canary for one in self._compared()):
            return 0.0
        able = [one for one in self.endpoints.values() if one.ready and not one.canary]
        if not able:
            return math.inf
        if queue_is_empty and any(one.free_slots > 0 for one in able):
            return 0.0
        ahead = sum(work for rank, work in self._queued_work.items() if rank <= priority)
        return (ahead + 0.5 * self._typical_work) * self.seconds_per_unit / len(able)

    def enqueue(self, profile: RequestProfile, now_s: float, *, exclusive: bool = False) -> QueuedRequest:
        """Append a request to the queue of its priority, or to those that get a replica without other requests."""
        queued = QueuedRequest(next(self._numbers), profile, now_s)
        self.arrived += 1
        if exclusive:
            self._exclusive.append(queued)
        else:
            heapq.heappush(self._queues.setdefault(profile.subset, []), (profile.priority, queued.number, queued))
        self._queued_work[profile.priority] = self._queued_work.get(profile.priority, 0.0) + profile.work_estimate
        if profile.queue_timeout_s < math.inf:
            heapq.heappush(self._deadlines, (now_s + profile.queue_timeout_s, queued.number, queued))
        return queued

    def cancel(self, queued: QueuedRequest) -> None:
        """Remove a request from the queue; no effect once it is dispatched."""
        if not queued.done and queued.endpoint is None:
            queued.done = True
            self._queued_work[queued.profile.priority] -= queued.profile.work_estimate

    def pop_expired(self, now_s: float) -> Iterator[QueuedRequest]:
        """Cancel and yield the requests whose queue timeout has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            queued = heapq.heappop(self._deadlines)[2]
            if not queued.done and queued.endpoint is None:
                self.cancel(queued)
                self.expired += 1
                yield queued

    def dispatch(self, now_s: float) -> Iterator[QueuedRequest]:
        """Assign queued requests to replicas with free slots, highest priority first, and yield them."""
        if self._exclusive:
            yield from self._dispatch_exclusive(now_s)
        blocked: set[frozenset[str] | None] = set()
        while queue := self._next_queue(blocked):
            queued = queue[0][2]
            holders = self.prefixes.holders(queued.profile.blocks)
            if not (able := self._able(queued.profile, holders, now_s)):
                if (subset := queued.profile.subset) is None:
                    return
                blocked.add(subset)
                continue
            heapq.heappop(queue)
            self._queued_work[queued.profile.priority] -= queued.profile.work_estimate
            self._start(queued, self.choose(queued.profile, able, holders, now_s), now_s)
            yield queued

    def _next_queue(self, blocked: Set[frozenset[str] | None]) -> _Queue | None:
        """Return the queue whose first request is next, without the blocked ones; forget queues that are empty."""
        found: _Queue | None = None
        for subset, queue in list(self._queues.items()):
            while queue and queue[0][2].done:
                heapq.heappop(queue)
            if not queue:
                if subset is not None:
                    del self._queues[subset]
            elif subset not in blocked and (found is None or queue[0] < found[0]):
                found = queue
        return found

    def _able(
        self, profile: RequestProfile, holders: Sequence[Mapping[Endpoint, None]], now_s: float
    ) -> list[Endpoint]:
        """Return the endpoints that may take this request now; none if the free slots are kept for others."""
        reserved = self._reserved_slots(profile.priority)
        if profile.subset is not None:
            able = self._candidates(self.subset(profile.subset), now_s)
            return able if _free_slots(able) > reserved else []
        able = self._candidates(self._compared(holders), now_s)
        if _free_slots(able) <= reserved:
            able = self._candidates(self.endpoints.values(), now_s)
        return able if _free_slots(able) > reserved else []

    def subset(self, addresses: Iterable[str]) -> list[Endpoint]:
        """Return the endpoints with these addresses."""
        return [one for address in addresses if (one := self._by_address.get(address))]

    def _dispatch_exclusive(self, now_s: float) -> Iterator[QueuedRequest]:
        """Reserve replicas for the requests that run alone, a quarter at most, and start them when they are idle."""
        self._exclusive = [one for one in self._exclusive if not one.done]
        able = {one.name: one for one in self.endpoints.values() if one.is_able(now_s) and not one.canary}
        held = {one.reserved_for: one for one in self.endpoints.values() if one.reserved_for}
        for queued, one in held.items():
            if queued.done or (queued.endpoint is None and one.name not in able):
                one.reserved_for = None
        held = {queued: one for queued, one in held.items() if one.reserved_for}
        for queued in list(self._exclusive):
            free = [one for one in able.values() if not one.reserved_for]
            if queued not in held and free and len(held) < max(1, len(able) // 4):
                held[queued] = min(
                    free, key=lambda one: (one.running, one.remaining_work(now_s, self.seconds_per_unit))
                )
                held[queued].reserved_for = queued
            if queued in held and held[queued].running == 0:
                self._exclusive.remove(queued)
                self._queued_work[queued.profile.priority] -= queued.profile.work_estimate
                self._start(queued, held[queued], now_s)
                yield queued

    def _reserved_slots(self, priority: int) -> int:
        """Return the slots kept free for higher priorities: one standard deviation of their Poisson load."""
        higher = sum(count for rank, count in self._running_by_priority.items() if rank < priority)
        return math.ceil(math.sqrt(higher))

    def _compared(self, holders: Sequence[Mapping[Endpoint, None]] = ()) -> Iterable[Endpoint]:
        """Return the endpoints to compare: all of a small pool, else a random sample and some that hold the prefix.

        The least loaded of a few random endpoints is nearly as good as the least loaded of all.
        """
        if len(self._sampled) <= _MAX_COMPARED or self.has_canaries:
            return self._sampled
        found = self._random.choices(self._sampled, k=_MAX_COMPARED // 2)
        if holders:
            known = list(holders[-1])
            known = known if len(known) < len(found) else self._random.choices(known, k=len(found))
            found += [one for one in known if not one.removed]
        return found

    def _candidates(self, compared: Iterable[Endpoint], now_s: float) -> list[Endpoint]:
        """Return the endpoints with a free slot that may take the next request, so that canaries receive their weight.

        With a canary weight of 0, canaries receive nothing.
        """
        free = [one for one in compared if one.free_slots > 0 and one.is_able(now_s) and not one.reserved_for]
        if not self.has_canaries:
            return free
        canary_turn = self._dispatched_to_canaries < self.canary_weight * (self._dispatched + 1)
        preferred = [one for one in free if one.canary == canary_turn]
        return preferred or [one for one in free if self.canary_weight or not one.canary]

    def choose(
        self, profile: RequestProfile, able: list[Endpoint], holders: Sequence[Mapping[Endpoint, None]], now_s: float
    ) -> Endpoint:
        """Return the endpoint predicted to finish first, from its remaining work and its prefix-cache hits.

        A cached prefix counts as the work that it saves, so a busy replica does not attract all requests of one prefix.
        """
        if self.routing == "round-robin":
            return min(able, key=lambda one: one.dispatched)
        seconds_per_unit, prompt_tokens = self.seconds_per_unit, profile.prompt_tokens

        def cost(one: Endpoint) -> float:
            cached = min(_tokens(matched(holders, one)), prompt_tokens) if holders else 0.0
            load = _ADAPTER_LOAD_WORK if profile.adapter and profile.adapter not in one.adapters else 0.0
            return one.remaining_work(now_s, seconds_per_unit) - cached + load

        return min(able, key=lambda one: (cost(one), one.running))

    def fallback_endpoints(self, queued: QueuedRequest, now_s: float) -> list[Endpoint]:
        """Return two endpoints to retry on if the chosen one fails, the least loaded first."""

        def others(compared: Iterable[Endpoint]) -> dict[str, Endpoint]:
            return {one.name: one for one in compared if one.ready and not one.canary and one is not queued.endpoint}

        if (subset := queued.profile.subset) is not None:
            able = others(self.subset(subset))
        elif len(able := others(self._compared())) < _FALLBACKS:
            able = others(self.endpoints.values())
        return heapq.nsmallest(
            _FALLBACKS, able.values(), key=lambda one: one.remaining_work(now_s, self.seconds_per_unit)
        )

    def _start(self, queued: QueuedRequest, one: Endpoint, now_s: float) -> None:
        profile = queued.profile
        cached_tokens = _tokens(matched(self.prefixes.holders(profile.blocks), one))
        one.change_running(1, now_s)
        queued.endpoint, queued.started_s, queued.in_flight_s_at_start = one, now_s, one.in_flight_s
        queued.work_estimate = max(profile.work_estimate - cached_tokens, _OUTPUT_TOKEN_WORK * profile.output_tokens)
        one.dispatched += 1
        self._running_by_priority[profile.priority] += 1
        self._typical_work += _LEARNING_RATE * (profile.work_estimate - self._typical_work)
        self._dispatched += 1
        self._dispatched_to_canaries += one.canary
        one.add_work(queued.work_estimate, now_s, self.seconds_per_unit)
        if profile.adapter:
            one.adapters.add(profile.adapter)
        self.prefixes.learn(profile.blocks, one)

    def finish(self, queued: QueuedRequest, now_s: float, *, output_tokens: float | None = None) -> None:
        """Free the slot of a dispatched request, and update the pool's speed if its output tokens are known."""
        one = queued.endpoint
        if one is None or queued.done:
            return
        queued.done = True
        one.change_running(-1, now_s)
        if one.reserved_for is queued:
            one.reserved_for = None
        self._running_by_priority[queued.profile.priority] -= 1
        took_s, in_flight_s = now_s - queued.started_s, one.in_flight_s - queued.in_flight_s_at_start
        own_s = took_s**2 / in_flight_s if in_flight_s else 0.0  # duration / mean concurrency
        one.add_work(-max(0.0, queued.work_estimate - own_s / self.seconds_per_unit), now_s, self.seconds_per_unit)
        work = queued.work_estimate + _OUTPUT_TOKEN_WORK * ((output_tokens or 0.0) - queued.profile.output_tokens)
        if output_tokens is not None and own_s and work > 0:
            self.seconds_per_unit += _LEARNING_RATE * (own_s / work - self.seconds_per_unit)

    def move(self, queued: QueuedRequest, served: Endpoint, now_s: float) -> None:
        """Account for a dispatched request at another endpoint: the gateway's retry was answered there."""
        chosen = queued.endpoint
        if chosen is None or queued.done or chosen is served:
            return
        chosen.change_running(-1, now_s)
        chosen.add_work(-queued.work_estimate, now_s, self.seconds_per_unit)
        served.change_running(1, now_s)
        served.add_work(queued.work_estimate, now_s, self.seconds_per_unit)
        queued.endpoint, queued.started_s, queued.in_flight_s_at_start = served, now_s, served.in_flight_s
        self.prefixes.learn(queued.profile.blocks, served)

    def add(self, endpoint: Endpoint) -> None:
        """Add a replica, or replace the one of the same name."""
        self.remove(endpoint.name)
        self.endpoints[endpoint.name] = self._by_address[endpoint.address] = endpoint
        self._sampled.append(endpoint)
        self.has_canaries |= endpoint.canary

    def remove(self, name: str) -> None:
        """Remove a replica; its running requests are not counted any more."""
        if one := self.endpoints.pop(name, None):
            one.removed = True
            if self._by_address.get(one.address) is one:
                del self._by_address[one.address]
            self._sampled.remove(one)


def _free_slots(endpoints: Iterable[Endpoint]) -> int:
    return sum(one.free_slots for one in endpoints)


def _tokens(blocks: int) -> float:
    return blocks * BLOCK_CHARS / CHARS_PER_TOKEN
