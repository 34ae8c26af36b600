"""The heart of the picker: who is served next, by which replica, and who is told to come back later.

Nothing here waits or reads a clock: every function is told the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from powerband.core.fleet import Routing
from powerband.core.prefix_hash import BLOCK, CHARACTERS_PER_TOKEN
from powerband.serve.router.prefix_index import PrefixIndex

_OUTPUT_UNITS = 4.0  # a token written costs about as much as so many read; only ratios matter, the scale is learned
_ADAPTER_UNITS = 200.0  # to load an adapter that a replica does not hold
_LEARNED = 0.1  # of each answer, when the speed of a pool is adjusted


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """What the picker must know of a request."""

    prompt_tokens: float
    output_tokens: float  # expected
    blocks: tuple[int, ...] = ()
    fine: tuple[int, ...] = ()  # smaller ones, where traffic is noted
    messages: tuple[tuple[str, str], ...] = ()  # who said what, where even that is noted
    priority: int = 1  # the lowest number goes first
    queue_timeout_s: float = math.inf  # how long it may wait for its first token
    adapter: str = ""
    turns: int = 1

    @property
    def units(self) -> float:
        """Return the work that it is."""
        return self.prompt_tokens + _OUTPUT_UNITS * self.output_tokens


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from its arrival to its end."""

    number: int
    ask: RequestProfile
    came_s: float
    backend: Endpoint | None = None
    began_s: float = 0.0
    shared_s: float = 0.0  # of its replica, when it began there
    units: float = 0.0
    gone: bool = False  # it waits no more


@dataclass(slots=True, eq=False)
class Endpoint:
    """A replica, as the picker sees it."""

    name: str
    address: str
    most: int  # requests at once
    ready: bool = True
    recipe: str = ""
    canary: bool = False  # it serves a recipe that is on trial
    running: int = 0
    shared_s: float = 0.0  # seconds of answering, of all its requests together
    sent: int = 0
    adapters: set[str] = field(default_factory=set)
    _units: float = 0.0
    _as_of_s: float = 0.0
    _changed_s: float = 0.0

    def count(self, more: int, now_s: float) -> None:
        """Note that it answers more requests from now on, or fewer."""
        self.shared_s += self.running * (now_s - self._changed_s)
        self._changed_s = now_s
        self.running += more

    def left(self, now_s: float, unit_s: float) -> float:
        """Return the work that is still to be done, if it goes on as usual."""
        done = (now_s - self._as_of_s) / unit_s
        return max(0.0, self._units - done)

    def add(self, units: float, now_s: float, unit_s: float) -> None:
        """Give it more work, or take some away."""
        self._units = max(0.0, self.left(now_s, unit_s) + units)
        self._as_of_s = now_s


class EndpointPool:
    """The replicas that serve one recipe, and the requests that wait for them."""

    def __init__(
        self,
        usual: RequestProfile,
        *,
        rate_per_s: float | None = None,
        routing: Routing = "prefix",
    ) -> None:
        self.routing = routing
        self.backends: dict[str, Endpoint] = {}
        self.prefixes = PrefixIndex()
        self.unit_s = 1.0 / (rate_per_s * usual.units) if rate_per_s else 0.001  # of one replica; learned
        self._usual_units = usual.units  # of a request; learned
        self._running: Counter[int] = Counter()  # by class
        self.arrived = self._sent = self._sent_to_canaries = 0
        self.share = 0.0  # of the requests that go to a recipe on trial
        self._waiting: list[tuple[int, int, QueuedRequest]] = []
        self._units_waiting: dict[int, float] = {}
        self._deadlines: list[tuple[float, int, QueuedRequest]] = []
        self._numbers = itertools.count(1)

    @property
    def depth(self) -> int:
        """Return how many wait."""
        return sum(1 for _, _, one in self._waiting if not one.gone)

    @property
    def running(self) -> int:
        """Return how many are being answered."""
        return sum(one.running for one in self.backends.values())

    def wait_s(self, priority: int, now_s: float) -> float:
        """Return how long a newcomer of a class would wait before it is sent on."""
        able = [one for one in self.backends.values() if one.ready and not one.canary]
        if not able:
            return math.inf
        if not self._waiting and any(one.running < one.most for one in able):
            return 0.0
        ahead = sum(units for rank, units in self._units_waiting.items() if rank <= priority)
        return (ahead + 0.5 * self._usual_units) * self.unit_s / len(able)

    def enter(self, ask: RequestProfile, now_s: float) -> QueuedRequest:
        """Take a place in the queue."""
        ticket = QueuedRequest(next(self._numbers), ask, now_s)
        self.arrived += 1
        heapq.heappush(self._waiting, (ask.priority, ticket.number, ticket))
        self._units_waiting[ask.priority] = self._units_waiting.get(ask.priority, 0.0) + ask.units
        if ask.queue_timeout_s < math.inf:
            heapq.heappush(self._deadlines, (now_s + ask.queue_timeout_s, ticket.number, ticket))
        return ticket

    def leave(self, ticket: QueuedRequest) -> None:
        """Give the place in the queue up."""
        if not ticket.gone and ticket.backend is None:
            ticket.gone = True
            self._units_waiting[ticket.ask.priority] -= ticket.ask.units

    def expired(self, now_s: float) -> Iterator[QueuedRequest]:
        """Take out those that have waited for too long."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            ticket = heapq.heappop(self._deadlines)[2]
            if not ticket.gone and ticket.backend is None:
                self.leave(ticket)
                yield ticket

    def dispatch(self, now_s: float) -> Iterator[QueuedRequest]:
        """Send on whoever can be served now, the first class first."""
        free = [one for one in self.backends.values() if one.ready and one.running < one.most]
        while self._waiting and (able := self._whose_turn(free)):
            if self._waiting[0][2].gone:
                heapq.heappop(self._waiting)
                continue
            if sum(one.most - one.running for one in able) <= self._reserved(self._waiting[0][0]):
                return
            ticket = heapq.heappop(self._waiting)[2]
            self._units_waiting[ticket.ask.priority] -= ticket.ask.units
            chosen = self._start(ticket, self.choose(ticket.ask, able, now_s), now_s)
            if chosen.running >= chosen.most:
                free.remove(chosen)
            yield ticket

    def _reserved(self, priority: int) -> int:
        """Return how many places stay free for higher classes: as many as chance makes of those that are about."""
        return math.ceil(math.sqrt(sum(count for rank, count in self._running.items() if rank < priority)))

    def _whose_turn(self, free: list[Endpoint]) -> list[Endpoint]:
        """Return the replicas that may be sent to: those of a recipe on trial get their share, and nothing before."""
        if not any(one.canary for one in self.backends.values()):
            return free
        turn = self._sent_to_canaries < self.share * (self._sent + 1)
        return [one for one in free if one.canary == turn] or [one for one in free if self.share or not one.canary]

    def choose(self, ask: RequestProfile, able: Collection[Endpoint], now_s: float) -> Endpoint:
        """Return who would be done first: what is left of its work, and what of the prompt it has not read.

        A prefix in a cache is worth the work that it saves and no more: a busy replica loses its attraction by itself.
        """
        if self.routing == "round-robin":
            return min(able, key=lambda one: one.sent)
        matched = self.prefixes.matched(ask.blocks)
        unit_s = self.unit_s

        def work(one: Endpoint) -> float:
            saved = min(matched.get(one.name, 0) * BLOCK / CHARACTERS_PER_TOKEN, ask.prompt_tokens) if matched else 0.0
            load = _ADAPTER_UNITS if ask.adapter and ask.adapter not in one.adapters else 0.0
            return one.left(now_s, unit_s) - saved + load

        return min(able, key=lambda one: (work(one), one.running))

    def others(self, ticket: QueuedRequest, now_s: float) -> list[Endpoint]:
        """Return whom to ask where the chosen one does not answer, the least busy first."""
        able = [one for one in self.backends.values() if one.ready and not one.canary and one is not ticket.backend]
        return heapq.nsmallest(2, able, key=lambda one: one.left(now_s, self.unit_s))

    def _start(self, ticket: QueuedRequest, one: Endpoint, now_s: float) -> Endpoint:
        ask = ticket.ask
        saved = self.prefixes.matched(ask.blocks).get(one.name, 0) * BLOCK / CHARACTERS_PER_TOKEN
        one.count(1, now_s)
        ticket.backend, ticket.began_s, ticket.shared_s = one, now_s, one.shared_s
        ticket.units = max(ask.units - saved, _OUTPUT_UNITS * ask.output_tokens)
        one.sent += 1
        self._running[ask.priority] += 1
        self._usual_units += _LEARNED * (ask.units - self._usual_units)
        self._sent += 1
        self._sent_to_canaries += one.canary
        one.add(ticket.units, now_s, self.unit_s)
        if ask.adapter:
            one.adapters.add(ask.adapter)
        self.prefixes.learn(ask.blocks, one.name)
        return one

    def finish(self, ticket: QueuedRequest, now_s: float, *, output_tokens: float | None = None) -> None:
        """Note an answer's end, and learn from it how fast the pool is."""
        one = ticket.backend
        if one is None or ticket.gone:
            return
        ticket.gone = True
        one.count(-1, now_s)
        self._running[ticket.ask.priority] -= 1
        took_s, shared_s = now_s - ticket.began_s, one.shared_s - ticket.shared_s
        own_s = took_s**2 / shared_s if shared_s else 0.0  # it was one of so many at once, on average
        one.add(-max(0.0, ticket.units - own_s / self.unit_s), now_s, self.unit_s)
        done = ticket.units + _OUTPUT_UNITS * ((output_tokens or 0.0) - ticket.ask.output_tokens)
        if output_tokens is not None and own_s and done > 0:
            self.unit_s += _LEARNED * (own_s / done - self.unit_s)

    def add(self, backend: Endpoint) -> None:
        """A replica is there."""
        self.backends[backend.name] = backend

    def remove(self, name: str) -> None:
        """A replica is gone; what it was answering is not our business any more."""
        if self.backends.pop(name, None):
            self.prefixes.forget(name)
