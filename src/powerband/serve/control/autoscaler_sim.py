"""Simulator for autoscalers: replay a request trace against a scaling function, and report attainment and cost."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from powerband.serve.control.autoscaler import Autoscaler, FleetSnapshot, ScalingPolicy

ScalingFunction = Callable[[FleetSnapshot], int]  # the desired number of replicas


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ReplicaSpeed:
    """Model of one replica: `slots` concurrent requests, each at a constant speed."""

    slots: int
    prefill_s_per_token: float
    decode_s_per_token: float
    start_s: float
    ttft_s: float  # limit of the SLO

    def service_s(self, request: Arrival) -> float:
        """Return how long a request occupies its slot."""
        return self.prefill_s_per_token * request.prompt_tokens + self.decode_s_per_token * request.output_tokens

    def rate_per_s(self, trace: Sequence[Arrival]) -> float:
        """Return the request rate at which one replica is fully busy."""
        return self.slots * len(trace) / sum(self.service_s(one) for one in trace)


@dataclass(frozen=True)
class SimulationResult:
    """Attainment and cost of one simulation."""

    attainment: float  # share of requests within the TTFT limit
    worst_minute_attainment: float
    replica_s: float  # replica-seconds paid for, including starts
    max_replicas: int
    starts: int


def simulate(
    trace: Sequence[Arrival],
    speed: ReplicaSpeed,
    scale: ScalingFunction,
    *,
    initial_replicas: int,
    interval_s: float = 1.0,
) -> SimulationResult:
    """Replay a trace, calling the scaling function once per interval.

    A replica that is scaled down takes no new requests and is paid for until its last running request ends.
    """
    free = initial_replicas * speed.slots  # slots of ready replicas
    ready, starting, retiring = initial_replicas, deque[float](), 0
    waiting: deque[Arrival] = deque()
    ends: list[float] = []
    attained = arrived = 0
    minutes: dict[int, list[int]] = {}
    paid_s, max_replicas, starts, last_s = 0.0, initial_replicas, 0, 0.0
    index, horizon = 0, trace[-1].at_s
    tick = 0.0
    while index < len(trace) or waiting or ends:
        next_arrival = trace[index].at_s if index < len(trace) else math.inf
        now = min(next_arrival, ends[0] if ends else math.inf, tick if tick <= horizon or waiting else math.inf)
        if starting:
            now = min(now, starting[0])
        paid_s += (now - last_s) * (ready + len(starting) + math.ceil(retiring / speed.slots))
        last_s = now
        while starting and starting[0] <= now:
            starting.popleft()
            ready, free = ready + 1, free + speed.slots
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            if retiring:
                retiring -= 1
            else:
                free += 1
        while index < len(trace) and trace[index].at_s <= now:
            waiting.append(trace[index])
            index, arrived = index + 1, arrived + 1
        while waiting and free > 0:
            request = waiting.popleft()
            in_time = now - request.at_s + speed.prefill_s_per_token * request.prompt_tokens <= speed.ttft_s
            attained += in_time
            minutes.setdefault(int(request.at_s // 60), []).append(in_time)
            heapq.heappush(ends, now + speed.service_s(request))
            free -= 1
        if tick <= now:
            tick += interval_s
            desired = scale(FleetSnapshot(now, ready, len(starting), len(waiting), len(ends), arrived))
            while desired > ready + len(starting):
                starting.append(now + speed.start_s)
                starts += 1
            while desired < ready + len(starting) and starting:
                starting.pop()
            if desired < ready:
                removed = (ready - desired) * speed.slots
                ready = desired
                idle = min(free, removed)  # idle slots are removed at once, busy ones when their request ends
                free, retiring = free - idle, retiring + removed - idle
            max_replicas = max(max_replicas, ready + len(starting))
    worst = min(sum(one) / len(one) for one in minutes.values())
    return SimulationResult(attained / len(trace), worst, paid_s, max_replicas, starts)


def fixed(count: int) -> ScalingFunction:
    """Return a function that never scales."""
    return lambda _: count


def ours(policy: ScalingPolicy) -> ScalingFunction:
    """Return the autoscaler that `serve` runs."""
    return Autoscaler(policy).desired_replicas


def threshold(
    target: float, *, min_replicas: int, max_replicas: int, stabilization_s: float = 300.0, interval_s: float = 15.0
) -> ScalingFunction:
    """Return a scaler like KEDA and the HPA: a target number of requests per replica, with a scale-down window."""
    recent: deque[tuple[float, int]] = deque()
    evaluated_s, desired = -math.inf, min_replicas

    def scale(snapshot: FleetSnapshot) -> int:
        nonlocal evaluated_s, desired
        if snapshot.at_s - evaluated_s < interval_s:
            return desired
        evaluated_s = snapshot.at_s
        need = max(min_replicas, min(max_replicas, math.ceil((snapshot.waiting + snapshot.running) / target)))
        recent.append((snapshot.at_s, need))
        while recent[0][0] < snapshot.at_s - stabilization_s:
            recent.popleft()
        desired = max(count for _, count in recent)
        return desired

    return scale


def oracle(trace: Sequence[Arrival], speed: ReplicaSpeed) -> float:
    """Return a lower bound on replica-seconds: the total work, on replicas that start instantly and are never idle."""
    return sum(speed.service_s(one) for one in trace) / speed.slots
