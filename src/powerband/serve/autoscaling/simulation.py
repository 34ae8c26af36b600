"""Simulate a fleet under a scaling function: replay a request trace, report attainment, cost and a timeline.

As in `serve`, requests wait in one queue per model for a free slot, go to the least busy replica, and are rejected, or
sent to the fallback model, after the queue timeout. A replica is paid for from the decision to start it until its last
request ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed, SimulatedReplica
from powerband.serve.autoscaling.snapshot import FleetSnapshot

ScalingFunction = Callable[[FleetSnapshot], int]  # the desired number of replicas
_TICK, _ARRIVAL, _REPLICA, _STARTED, _FAULT = range(5)
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 30.0  # after failed starts in a row


@dataclass(frozen=True)
class SimulatedModel:
    """One model of a simulated fleet."""

    trace: Sequence[Arrival]
    speed: ReplicaSpeed
    scale: ScalingFunction
    initial_replicas: int
    start_s: float
    devices: int = 1  # of one replica
    fallback: str = ""  # the model that serves what this one has no capacity for


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulation."""

    start_spread: float = 0.0  # standard deviation of the logarithm of the start time
    start_failures: float = 0.0  # share of the starts that fail; they are repeated after a back-off
    crashes_s: tuple[float, ...] = ()  # at each of these times one ready replica dies
    metrics_stop_s: tuple[float, float] = (math.inf, math.inf)  # the snapshots repeat the last one
    clock_jumps: tuple[tuple[float, float], ...] = ()  # (at, by): added to the time of all later snapshots
    seed: int = 0


@dataclass(frozen=True)
class Moment:
    """State of a model at one tick."""

    at_s: float
    ready: int
    starting: int
    waiting: int
    running: int
    arrived: int
    rejected: int
    late: int
    desired: int


@dataclass(frozen=True)
class SimulationResult:
    """Attainment and cost of one model in a simulation."""

    requests: int
    attained: int  # first token within the limit
    rejected: int
    overflowed: int  # served by the fallback model
    broken: int  # died with their replica after the first token
    replica_s: float  # replica-seconds paid for, including starts
    max_replicas: int
    starts: int
    failed_starts: int
    worst_minute_attainment: float
    late: tuple[bool, ...]  # by request
    timeline: tuple[Moment, ...]

    @property
    def attainment(self) -> float:
        """Return the share of requests with their first token within the limit."""
        return self.attained / self.requests if self.requests else 1.0


@dataclass
class _Model:
    name: str
    about: SimulatedModel
    replicas: list[SimulatedReplica] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    late: list[bool] = field(default_factory=list)
    arrived: int = 0
    rejected: int = 0
    late_tokens: int = 0
    refused: int = 0  # neither served here nor by the fallback
    overflowed: int = 0
    broken: int = 0
    paid_s: float = 0.0
    starts: int = 0
    failed_starts: int = 0
    max_replicas: int = 0
    wanted: int = 0
    timeline: list[Moment] = field(default_factory=list)
    last: FleetSnapshot | None = None


def simulate(
    trace: Sequence[Arrival],
    speed: ReplicaSpeed,
    scale: ScalingFunction,
    *,
    initial_replicas: int,
    start_s: float,
    interval_s: float = 1.0,
    faults: Faults | None = None,
) -> SimulationResult:
    """Simulate a fleet of one model."""
    model = SimulatedModel(trace, speed, scale, initial_replicas, start_s)
    return simulate_fleet({"": model}, interval_s=interval_s, faults=faults)[""]


def simulate_fleet(
    models: Mapping[str, SimulatedModel],
    *,
    devices: int | None = None,
    interval_s: float = 1.0,
    faults: Faults | None = None,
) -> dict[str, SimulationResult]:
    """Simulate several models that share a number of devices; None: there are enough devices."""
    return _Simulation(models, devices, interval_s, faults or Faults()).run()


class _Simulation:
    def __init__(
        self, models: Mapping[str, SimulatedModel], devices: int | None, interval_s: float, faults: Faults
    ) -> None:
        self.models = {name: _Model(name, one) for name, one in models.items()}
        self.free_devices = math.inf if devices is None else devices
        self.interval_s, self.faults = interval_s, faults
        self.random = random.Random(faults.seed)
        self.horizon_s = max(one.trace[-1].at_s for one in models.values())
        self.events: list[tuple[float, int, int, _Model | None, SimulatedReplica | None, int]] = []
        self.count = 0

    def run(self) -> dict[str, SimulationResult]:
        for one in self.models.values():
            for _ in range(one.about.initial_replicas):
                one.replicas.append(SimulatedReplica(one.about.speed, began_s=0.0, state="ready"))
                self.free_devices -= one.about.devices
            one.wanted = one.max_replicas = one.about.initial_replicas
            one.late = [True] * len(one.about.trace)
            if one.about.trace:
                self._push(one.about.trace[0].at_s, _ARRIVAL, one)
        self._push(0.0, _TICK)
        for at_s in self.faults.crashes_s:
            self._push(at_s, _FAULT)
        while self.events:
            now_s, kind, _, model, replica, attempt = heapq.heappop(self.events)
            if kind == _REPLICA and model and replica:
                if replica.next_s == now_s:  # otherwise a later dispatch replaced the event
                    self._advance(model, replica, now_s)
            elif kind == _ARRIVAL and model:
                self._arrive(model, now_s)
            elif kind == _STARTED and model and replica:
                self._started(model, replica, now_s, attempt)
            elif now_s > self.horizon_s:
                continue
            elif kind == _TICK:
                self._tick(now_s)
            else:
                self._crash(now_s)
        return {name: self._result(one) for name, one in self.models.items()}

    def _push(
        self,
        at_s: float,
        kind: int,
        model: _Model | None = None,
        replica: SimulatedReplica | None = None,
        attempt: int = 0,
    ) -> None:
        self.count += 1
        heapq.heappush(self.events, (at_s, kind, self.count, model, replica, attempt))

    def _arrive(self, model: _Model, now_s: float) -> None:
        trace = model.about.trace
        while model.arrived < len(trace) and trace[model.arrived].at_s <= now_s:
            model.queue.append(model.arrived)
            model.arrived += 1
        if model.arrived < len(trace):
            self._push(trace[model.arrived].at_s, _ARRIVAL, model)
        self._dispatch(model, now_s)

    def _dispatch(self, model: _Model, now_s: float) -> None:
        """Send queued requests to the least busy replicas with free slots, after those that waited too long left."""
        queue, trace, speed = model.queue, model.about.trace, model.about.speed
        while queue:
            number = queue[0]
            if now_s - trace[number].at_s > speed.queue_timeout_s:
                queue.popleft()
                self._reject(model, number, now_s)
                continue
            best = None
            for replica in model.replicas:
                if replica.state == "ready" and (best is None or replica.running < best.running):
                    best = replica
                    if not replica.running:
                        break
            if best is None or best.running >= speed.slots:
                return
            queue.popleft()
            before_s = best.next_s
            best.dispatch(now_s, number, trace[number])
            if best.next_s != before_s:
                self._push(best.next_s, _REPLICA, model, best)

    def _reject(self, model: _Model, number: int, now_s: float) -> None:
        model.rejected += 1
        if not model.about.fallback:
            model.refused += 1
            return
        other = self.models[model.about.fallback]
        request = model.about.trace[number]
        free = [one for one in other.replicas if one.state == "ready" and one.running < other.about.speed.slots]
        if not free:
            model.refused += 1
            return
        model.overflowed += 1
        best = min(free, key=lambda one: one.running)
        before_s = best.next_s
        best.dispatch(now_s, -1, request)  # it is counted here, not among the requests of the fallback
        if best.next_s != before_s:
            self._push(best.next_s, _REPLICA, other, best)

    def _advance(self, model: _Model, replica: SimulatedReplica, now_s: float) -> None:
        first, finished = replica.advance(now_s)
        if replica.next_s < math.inf:
            self._push(replica.next_s, _REPLICA, model, replica)
        if first is not None and first >= 0:
            late = now_s - model.about.trace[first].at_s > model.about.speed.ttft_s
            model.late[first] = late
            model.late_tokens += late
        if finished:
            if replica.state == "draining" and not replica.running:
                self._end(model, replica, now_s)
            self._dispatch(model, now_s)

    def _tick(self, now_s: float) -> None:
        self._push(now_s + self.interval_s, _TICK)
        stopped = self.faults.metrics_stop_s[0] <= now_s < self.faults.metrics_stop_s[1]
        clock_s = now_s + sum(by for at, by in self.faults.clock_jumps if at <= now_s)
        for model in self.models.values():
            self._dispatch(model, now_s)  # rejects those that waited too long
            ready = [one for one in model.replicas if one.state == "ready"]
            starting = [one for one in model.replicas if one.state == "starting"]
            running = sum(one.running for one in model.replicas)
            counts = (
                len(ready),
                len(starting),
                len(model.queue),
                running,
                model.arrived,
                model.rejected,
                model.late_tokens,
            )
            if not stopped or model.last is None:
                model.last = FleetSnapshot(clock_s, *counts)
            else:
                model.last = FleetSnapshot(
                    clock_s, counts[0], counts[1], *_seen(model.last), at_metrics_s=model.last.metrics_s
                )
            desired = model.about.scale(model.last)
            model.wanted = desired
            self._reconcile(model, ready, starting, now_s)
            model.timeline.append(Moment(now_s, *counts, desired))

    def _reconcile(
        self, model: _Model, ready: list[SimulatedReplica], starting: list[SimulatedReplica], now_s: float
    ) -> None:
        missing = model.wanted - len(ready) - len(starting)
        for _ in range(missing):
            if self.free_devices < model.about.devices:
                break  # it starts when another model frees devices
            self.free_devices -= model.about.devices
            replica = SimulatedReplica(model.about.speed, began_s=now_s, state="starting")
            model.replicas.append(replica)
            self._start(model, replica, now_s, attempt=0)
        surplus = -missing
        while surplus > 0 and starting:
            self._end(model, starting.pop(), now_s)
            surplus -= 1
        for replica in sorted(ready, key=lambda one: one.running)[: max(0, surplus)]:
            replica.state = "draining"
            if not replica.running:
                self._end(model, replica, now_s)
        model.max_replicas = max(model.max_replicas, sum(one.state != "draining" for one in model.replicas))

    def _start(self, model: _Model, replica: SimulatedReplica, now_s: float, *, attempt: int) -> None:
        model.starts += 1
        spread = self.faults.start_spread
        factor = math.exp(self.random.gauss(-spread * spread / 2, spread)) if spread else 1.0
        self._push(now_s + model.about.start_s * factor, _STARTED, model, replica, attempt)

    def _started(self, model: _Model, replica: SimulatedReplica, now_s: float, attempt: int) -> None:
        if replica.state != "starting":
            return  # it was stopped meanwhile
        if self.faults.start_failures and self.random.random() < self.faults.start_failures:
            model.failed_starts += 1
            self._start(model, replica, now_s + min(_MAX_BACKOFF_S, _BACKOFF_S * 2**attempt), attempt=attempt + 1)
            return
        replica.state = "ready"
        self._dispatch(model, now_s)

    def _crash(self, now_s: float) -> None:
        """End the busiest ready replica; requests without a first token wait again, the others break."""
        model = max(self.models.values(), key=lambda one: sum(replica.running for replica in one.replicas))
        ready = [one for one in model.replicas if one.state == "ready"]
        if not ready:
            return
        victim = max(ready, key=lambda one: one.running)
        for number in victim.requests():
            if number >= 0 and model.late[number]:
                model.queue.appendleft(number)
            elif number >= 0:
                model.late[number] = True
                model.broken += 1
        self._end(model, victim, now_s)
        self._dispatch(model, now_s)

    def _end(self, model: _Model, replica: SimulatedReplica, now_s: float) -> None:
        model.replicas.remove(replica)
        replica.state, replica.next_s = "ended", math.inf
        model.paid_s += min(now_s, self.horizon_s) - min(replica.began_s, self.horizon_s)
        self.free_devices += model.about.devices

    def _result(self, model: _Model) -> SimulationResult:
        for replica in list(model.replicas):
            self._end(model, replica, self.horizon_s)
        minutes: dict[int, list[bool]] = {}
        for one, late in zip(model.about.trace, model.late, strict=True):
            minutes.setdefault(int(one.at_s // 60), []).append(not late)
        return SimulationResult(
            requests=len(model.late),
            attained=model.late.count(False),
            rejected=model.refused,
            overflowed=model.overflowed,
            broken=model.broken,
            replica_s=model.paid_s,
            max_replicas=model.max_replicas,
            starts=model.starts,
            failed_starts=model.failed_starts,
            worst_minute_attainment=min((sum(one) / len(one) for one in minutes.values()), default=1.0),
            late=tuple(model.late),
            timeline=tuple(model.timeline),
        )


def _seen(last: FleetSnapshot) -> tuple[int, int, int, int, int]:
    return last.waiting, last.running, last.arrived, last.rejected, last.late


def fixed(count: int) -> ScalingFunction:
    """Return a function that never scales."""
    return lambda _: count


def scheduled(counts: Sequence[int], *, slot_s: float) -> ScalingFunction:
    """Return a function that follows a schedule: a number of replicas for each slot of time."""
    return lambda snapshot: counts[min(len(counts) - 1, int(snapshot.at_s / slot_s))]


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
