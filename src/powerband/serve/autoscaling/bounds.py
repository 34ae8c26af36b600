"""What other scalers would have cost on the same trace, chosen with hindsight: fixed sizes, thresholds, a clairvoyant.

A comparison is at equal attainment: the cheapest choice that attains at least a given share of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from powerband.serve.autoscaling import simulation
from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed
from powerband.serve.autoscaling.simulation import ScalingFunction, SimulationResult

TOLERANCE = 0.0005  # of an attainment that is compared: what two runs differ by where no request waits
_BUSIEST_MINUTE = 0.96


@dataclass(frozen=True)
class Choice:
    """A scaler chosen with hindsight."""

    name: str
    result: SimulationResult


class Hindsight:
    """Finds the cheapest choices of each kind on one trace. Results are kept, because they are needed repeatedly."""

    def __init__(
        self, trace: Sequence[Arrival], speed: ReplicaSpeed, *, slot_s: float = 15.0, interval_s: float = 1.0
    ) -> None:
        self.trace, self.speed, self.slot_s, self.interval_s = trace, speed, slot_s, interval_s
        self._results: dict[tuple[object, ...], SimulationResult] = {}
        self._late: list[list[int]] = []  # by slot of time, then by fixed number of replicas

    def fixed(self, count: int) -> SimulationResult:
        """Return the result of a fixed number of replicas."""
        return self._simulated(
            ("fixed", count), lambda: simulation.fixed(count), initial=count, start_s=0.0, interval_s=60.0
        )

    def best_fixed(self, attainment: float) -> Choice:
        """Return the smallest fixed number that attains a share; without one, the smallest that never makes it wait."""
        return self._smallest(lambda one: one.attainment >= attainment - TOLERANCE or not one.rejected)

    def peak_sized(self, attainment: float = _BUSIEST_MINUTE) -> Choice:
        """Return the smallest fixed number with which a share of every minute's requests is on time.

        Requests that are late even on an idle fleet do not count.
        """
        idle = self.fixed(self.max_count).late

        def enough(one: SimulationResult) -> bool:
            minutes: dict[int, list[int]] = {}
            for request, late, always in zip(self.trace, one.late, idle, strict=True):
                counts = minutes.setdefault(int(request.at_s // 60), [0, 0])
                counts[0] += 1
                counts[1] += late and not always
            return all(1 - late / count >= attainment for count, late in minutes.values())

        return self._smallest(enough)

    @property
    def max_count(self) -> int:
        """Return a number of replicas with which no request waits too long."""
        rate_per_s = len(self.trace) / self.trace[-1].at_s
        count = max(1, math.ceil(rate_per_s / self.speed.saturated_rate_per_s(self.trace)))
        while self.fixed(count).rejected:
            count *= 2
        return count

    def best_threshold(self, attainment: float, *, initial: int, start_s: float, most: int) -> Choice | None:
        """Return the cheapest threshold that attains a share; None: none does."""

        def result(target: float) -> SimulationResult:
            return self._simulated(
                ("threshold", target, initial, start_s, most),
                lambda: simulation.threshold(target, min_replicas=1, max_replicas=most),
                initial=initial,
                start_s=start_s,
                interval_s=self.interval_s,
            )

        choices = [Choice(f"{target:g} per replica", result(target)) for target in self._targets()]
        return _cheapest(choices, attainment)

    def clairvoyant(self, attainment: float, *, initial: int, start_s: float) -> Choice | None:
        """Return the cheapest schedule found that attains a share, made from the trace itself; None: none attains it.

        For each price of a late request, dynamic programming over slots of time finds the schedule of least cost, with
        the late requests of a slot taken from the fixed sizes. It is then simulated as any other scaler.
        """
        choices = [Choice("clairvoyant", self._follow_schedule(one, initial, start_s)) for one in self._prices()]
        return _cheapest(choices, attainment)

    def _targets(self) -> list[float]:
        """Return the thresholds to try: requests per replica, up to its slots."""
        return [self.speed.slots * step / 8 for step in range(1, 9)]

    def _prices(self) -> list[float]:
        return [self.slot_s * 2.0**step for step in range(-3, 8)]

    def _smallest(self, enough: Callable[[SimulationResult], bool]) -> Choice:
        low, high = 0, self.max_count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(self.fixed(middle)) else (middle, high)
        return Choice(f"{high} replicas", self.fixed(high))

    def _follow_schedule(self, price_s: float, initial: int, start_s: float) -> SimulationResult:
        def follower() -> ScalingFunction:
            late = self._late_by_slot()
            counts = cheapest_schedule(late, price_s, slot_s=self.slot_s, initial=initial, start_s=start_s)
            ahead = math.ceil(start_s / self.slot_s)
            wanted = [max(counts[slot : slot + ahead + 1]) for slot in range(len(counts))]
            return simulation.scheduled(wanted, slot_s=self.slot_s)

        key = ("clairvoyant", price_s, initial, start_s)
        return self._simulated(key, follower, initial=initial, start_s=start_s, interval_s=self.interval_s)

    def _late_by_slot(self) -> list[list[int]]:
        if not self._late:
            most = self._smallest(lambda one: not one.rejected).result.max_replicas
            slots = int(self.trace[-1].at_s // self.slot_s) + 1
            table = [[0] * (most + 1) for _ in range(slots)]
            for request in self.trace:
                table[int(request.at_s // self.slot_s)][0] += 1
            for count in range(1, most + 1):
                for request, late in zip(self.trace, self.fixed(count).late, strict=True):
                    table[int(request.at_s // self.slot_s)][count] += late
            self._late = table
        return self._late

    def _simulated(
        self,
        key: tuple[object, ...],
        scaler: Callable[[], ScalingFunction],
        *,
        initial: int,
        start_s: float,
        interval_s: float,
    ) -> SimulationResult:
        if key not in self._results:
            self._results[key] = simulation.simulate(
                self.trace, self.speed, scaler(), initial_replicas=initial, start_s=start_s, interval_s=interval_s
            )
        return self._results[key]


def _cheapest(choices: Sequence[Choice], attainment: float) -> Choice | None:
    enough = [one for one in choices if one.result.attainment >= attainment - TOLERANCE]
    return min(enough, key=lambda one: one.result.replica_s, default=None)


def cheapest_schedule(
    late: Sequence[Sequence[int]], price_s: float, *, slot_s: float, initial: int, start_s: float
) -> list[int]:
    """Return the number of replicas in each slot that costs least.

    `late[slot][count]` requests are late with `count` replicas; each costs as much as `price_s` replica-seconds. A
    start costs `start_s` replica-seconds, and nothing is ready before `start_s` but the initial replicas.
    """
    counts, locked = range(len(late[0])), math.ceil(start_s / slot_s)
    cost = [0.0 if count == min(initial, len(late[0]) - 1) else math.inf for count in counts]
    came_from: list[list[int]] = []
    for slot, row in enumerate(late):
        previous = list(counts)
        best, best_from = list(cost), previous
        for count in counts[1:]:  # from below: each step up is a start
            if slot >= locked and best[count - 1] + start_s < best[count]:
                best[count], best_from[count] = best[count - 1] + start_s, best_from[count - 1]
        for count in reversed(counts[:-1]):
            if best[count + 1] < best[count]:
                best[count], best_from[count] = best[count + 1], best_from[count + 1]
        came_from.append(best_from)
        cost = [best[count] + count * slot_s + price_s * row[count] for count in counts]
    at = min(counts, key=cost.__getitem__)
    found = []
    for previous in reversed(came_from):
        found.append(at)
        at = previous[at]
    return found[::-1]
