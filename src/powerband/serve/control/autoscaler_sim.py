"""Play a trace of requests against a way to scale, before it is trusted with machines."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot, ScalingPolicy

Decide = Callable[[FleetSnapshot], int]


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ReplicaSpeed:
    """What one replica does: so many at once, each reading and writing at its pace."""

    places: int
    read_s: float  # for a token of the prompt
    write_s: float  # for a token of the answer
    start_s: float
    ttft_s: float  # that is promised

    def service_s(self, one: Arrival) -> float:
        """Return how long one place is taken."""
        return self.read_s * one.prompt_tokens + self.write_s * one.output_tokens

    def rate_per_s(self, trace: Sequence[Arrival]) -> float:
        """Return the requests per second that fill one replica."""
        return self.places * len(trace) / sum(self.service_s(one) for one in trace)


@dataclass(frozen=True)
class SimulationResult:
    """What came of it."""

    attainment: float  # share of requests whose first token came in time
    worst_minute: float  # the same, in the worst minute
    replica_s: float  # paid for, starts included
    most: int
    starts: int


def simulate(
    trace: Sequence[Arrival], speed: ReplicaSpeed, decide: Decide, *, begin: int, every_s: float = 1.0
) -> SimulationResult:
    """Let requests come as they did; every second the way to scale says how many replicas it wants.

    A replica that is no longer wanted takes nothing new, and is paid for until its last answer is written.
    """
    free = begin * speed.places  # places of ready replicas
    ready, starting, retiring = begin, deque[float](), 0
    waiting: deque[Arrival] = deque()
    ends: list[float] = []
    kept = arrived = 0
    minutes: dict[int, list[int]] = {}
    paid_s, most, starts, last_s = 0.0, begin, 0, 0.0
    place, horizon = 0, trace[-1].at_s
    tick = 0.0
    while place < len(trace) or waiting or ends:
        coming = trace[place].at_s if place < len(trace) else math.inf
        now = min(coming, ends[0] if ends else math.inf, tick if tick <= horizon or waiting else math.inf)
        if starting:
            now = min(now, starting[0])
        paid_s += (now - last_s) * (ready + len(starting) + math.ceil(retiring / speed.places))
        last_s = now
        while starting and starting[0] <= now:
            starting.popleft()
            ready, free = ready + 1, free + speed.places
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            if retiring:
                retiring -= 1
            else:
                free += 1
        while place < len(trace) and trace[place].at_s <= now:
            waiting.append(trace[place])
            place, arrived = place + 1, arrived + 1
        while waiting and free > 0:
            one = waiting.popleft()
            in_time = now - one.at_s + speed.read_s * one.prompt_tokens <= speed.ttft_s
            kept += in_time
            minutes.setdefault(int(one.at_s // 60), []).append(in_time)
            heapq.heappush(ends, now + speed.service_s(one))
            free -= 1
        if tick <= now:
            tick += every_s
            wanted = decide(FleetSnapshot(now, ready, len(starting), len(waiting), len(ends), arrived))
            while wanted > ready + len(starting):
                starting.append(now + speed.start_s)
                starts += 1
            while wanted < ready + len(starting) and starting:
                starting.pop()
            if wanted < ready:
                gone = (ready - wanted) * speed.places
                ready = wanted
                idle = min(free, gone)  # as many places as are idle go at once, the others with their answers
                free, retiring = free - idle, retiring + gone - idle
            most = max(most, ready + len(starting))
    worst = min(sum(held) / len(held) for held in minutes.values())
    return SimulationResult(kept / len(trace), worst, paid_s, most, starts)


def fixed(count: int) -> Decide:
    """Always as many."""
    return lambda _: count


def ours(policy: ScalingPolicy) -> Decide:
    """The policy that `serve` runs."""
    return Autoscaler(policy).wanted


def threshold(places: int, *, least: int, most: int, calm_s: float = 300.0, every_s: float = 15.0) -> Decide:
    """As KEDA and the HPA do it: so many requests per replica, looked at now and then, down only after a calm while."""
    lately: deque[tuple[float, int]] = deque()
    looked, answer = -math.inf, least

    def decide(seen: FleetSnapshot) -> int:
        nonlocal looked, answer
        if seen.at_s - looked < every_s:
            return answer
        looked = seen.at_s
        need = max(least, min(most, math.ceil((seen.waiting + seen.running) / places)))
        lately.append((seen.at_s, need))
        while lately[0][0] < seen.at_s - calm_s:
            lately.popleft()
        answer = max(count for _, count in lately)
        return answer

    return decide


def oracle(trace: Sequence[Arrival], speed: ReplicaSpeed) -> float:
    """Return replica-seconds below which nobody can stay: the work, on replicas that start at once and are full."""
    return sum(speed.service_s(one) for one in trace) / speed.places
