"""Autoscaler: the number of replicas, computed from the demand so far, so that it costs no more than a fixed fleet.

A late request has a price in replica-seconds: what one more replica of the best fixed size so far would pay for each
request that it saves. Each candidate asks, of a window of the past, for the size at which one more replica costs as
much as it saves. With the whole past as the window that is the best fixed size; short windows follow the demand. Where
the near past tells nothing about the next start time, the short windows lose in the ledger, and the fixed size is kept.

The clock is an input, so the same snapshots always give the same decisions.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from powerband.serve.autoscaling.forecast import BIN_S, DemandHistory, Lateness
from powerband.serve.autoscaling.ledger import Candidate, Ledger
from powerband.serve.autoscaling.policy import ScalingPolicy, Tuning
from powerband.serve.autoscaling.snapshot import FleetSnapshot

_MIN_BINS = 720  # kept in any case, if the start time turns out to be longer: an hour
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 60.0  # between two snapshots that are compared
_STALE_S = 10.0  # age of the request counts from which they are not believed
_UNAVOIDABLE_REQUESTS = 200.0  # weight of the assumption that no request is late for its own length
_MIN_BUDGET = 0.2  # of the late requests, for a lack of capacity


@dataclass(frozen=True)
class Decision:
    """How many replicas there should be, and why."""

    replicas: int
    reason: str
    fixed: int  # the best fixed size so far
    followed: str = "fixed"
    relative_cost: float = 1.0  # of what is followed, to the best fixed size, by the ledger
    trusted: bool = True  # False: the counts are stale or the clock jumped


class Autoscaler:
    """Applies a scaling policy to a series of snapshots."""

    def __init__(self, policy: ScalingPolicy, tuning: Tuning | None = None) -> None:
        self.policy, self._tuning = policy, tuning or Tuning()
        self._windows = {f"demand of the last {factor} windows": factor for factor in self._tuning.windows}
        self._holds_s = {f"peak of the last {hold_s:.0f} s": hold_s for hold_s in self._tuning.peak_holds_s}
        self.decision: Decision | None = None
        self._last: FleetSnapshot | None = None
        self._peaks: deque[tuple[float, float]] = deque()  # (at_s, slots), within the longest hold, highest first
        self._last_request_s = 0.0

    def desired_replicas(self, snapshot: FleetSnapshot) -> int:
        """Return how many replicas there should be."""
        return self.decide(snapshot).replicas

    def decide(self, snapshot: FleetSnapshot) -> Decision:
        """Return how many replicas there should be, and why."""
        last = self._last
        if last is None or self.decision is None:
            return self._begin(snapshot)
        seconds = snapshot.at_s - last.at_s
        if 0 <= seconds < _MIN_INTERVAL_S:
            return self.decision
        if problem := _problem(last, snapshot):
            return self._hold(snapshot, problem)
        self._last = snapshot
        if snapshot.arrived > last.arrived or snapshot.waiting or snapshot.running:
            self._last_request_s = snapshot.at_s
        completed_bin = self._history.observe(last, snapshot)
        self._remember_peak(snapshot)

        def late(replicas: int) -> float:
            return self._history.lateness(replicas, last, snapshot)

        self._ledger.advance(snapshot.at_s, seconds, start_s=self.policy.start_s, late=late)
        if completed_bin:
            self._forecast(snapshot)
        for one in self._ledger.candidates:
            if hold_s := self._holds_s.get(one.name):
                one.wanted = self._peak(snapshot, hold_s)
        return self._decide(snapshot)

    def _begin(self, snapshot: FleetSnapshot) -> Decision:
        """Keep the initial size: nothing is known about the demand yet."""
        size = self._clamped(snapshot.ready + snapshot.starting)
        self._last, self._initial, self._last_request_s = snapshot, max(1, size), snapshot.at_s
        longest = max(self._windows.values(), default=0)
        self._history = DemandHistory(self.policy, bins=max(_MIN_BINS, self._bins_of(longest)))
        rate_per_s = self._initial * self.policy.slots / self.policy.service_s
        self._unseen = rate_per_s * self._tuning.unseen_peak_s  # requests
        self._ledger = Ledger(["fixed", *self._windows, *self._holds_s], initial=size, margin=self._tuning.margin)
        self._price_s, self._fixed = 1.0, size
        self.decision = Decision(size, f"{size}: the initial size, until the demand is known", fixed=size)
        return self.decision

    def _hold(self, snapshot: FleetSnapshot, problem: str) -> Decision:
        """Keep the last size that trusted counts asked for, and learn nothing."""
        assert self.decision is not None and self._last is not None
        if "stale" not in problem:
            self._last = snapshot  # compare the next snapshot with this one
            self._peaks.clear()
            self._last_request_s = snapshot.at_s
        held = self.decision.replicas
        reason = f"held at {held}, the last safe size: {problem}"
        self.decision = Decision(held, reason, fixed=self._fixed, followed=self.decision.followed, trusted=False)
        return self.decision

    def _forecast(self, snapshot: FleetSnapshot) -> None:
        """Compute the best fixed size so far, the price of a late request, and what each forecast asks for."""
        seen, sizes = self._history.everything(), self._history.sizes
        unseen = [self._exposure(size) for size in sizes]
        late = [one + more for one, more in zip(seen.late, unseen, strict=True)]
        requests, span_s = seen.requests + self._unseen, seen.span_s + self._tuning.unseen_peak_s
        budget = self._budget(snapshot) * requests
        best = next((index for index, one in enumerate(late) if one <= budget), len(sizes) - 1)
        low, high = max(0, best - 2), min(len(sizes) - 1, best + 2)
        saved = (late[low] - late[high]) / (sizes[high] - sizes[low]) if high > low else 0.0
        self._fixed, self._price_s = sizes[best], span_s / max(saved, 1e-9)
        for one in self._ledger.candidates:
            if one is self._ledger.fixed:
                one.wanted = self._fixed
            elif factor := self._windows.get(one.name):
                one.wanted = self._cheapest(self._history.recent(self._bins_of(factor)))
        self._ledger.choose(self._price_s, exposure=self._exposure)

    def _bins_of(self, factor: int) -> int:
        return math.ceil(factor * self.policy.window_s / BIN_S)

    def _budget(self, snapshot: FleetSnapshot) -> float:
        """Return the share of requests that may lack capacity: what is wanted, less those late for another reason."""
        wanted = 1 - self.policy.attainment
        otherwise = snapshot.late / (snapshot.arrived + _UNAVOIDABLE_REQUESTS)
        return max(_MIN_BUDGET * wanted, wanted - otherwise)

    def _exposure(self, replicas: int) -> float:
        """Return the late requests of a peak that needs the initial size."""
        return self._unseen * max(0.0, 1 - replicas / self._initial)

    def _cheapest(self, seen: Lateness) -> int:
        """Return the size with the lowest cost over a span, late requests included."""
        costs = [
            size * seen.span_s + self._price_s * late for size, late in zip(self._history.sizes, seen.late, strict=True)
        ]
        return self._history.sizes[costs.index(min(costs))]

    def _remember_peak(self, snapshot: FleetSnapshot) -> None:
        slots = max(self._history.slots_used, float(snapshot.running + snapshot.waiting))
        while self._peaks and self._peaks[-1][1] <= slots:
            self._peaks.pop()
        self._peaks.append((snapshot.at_s, slots))
        while self._peaks[0][0] < snapshot.at_s - max(self._holds_s.values(), default=0.0):
            self._peaks.popleft()

    def _peak(self, snapshot: FleetSnapshot, hold_s: float) -> int:
        slots = next(slots for at_s, slots in self._peaks if at_s >= snapshot.at_s - hold_s)
        return self._clamped(math.ceil(slots / self.policy.slots - 1e-9))

    def _decide(self, snapshot: FleetSnapshot) -> Decision:
        followed = self._ledger.followed
        size, why = self._clamped(followed.wanted), self._why(followed)
        relative_cost = self._ledger.relative_cost(self._price_s)
        idle_s = snapshot.at_s - self._last_request_s
        if not self.policy.min_replicas and idle_s >= self.policy.idle_s:
            size, why = 0, f"no request for {idle_s:.0f} s"
        elif not size:
            size, why = 1, f"the last request came {idle_s:.0f} s ago"
        if missing := size - snapshot.ready - snapshot.starting:
            why += f"; {missing} more in {self.policy.start_s:.0f} s" if missing > 0 else f"; {-missing} fewer"
        self.decision = Decision(size, f"{size}: {why}", self._fixed, followed.name, relative_cost)
        return self.decision

    def _why(self, followed: Candidate) -> str:
        if followed is self._ledger.fixed:
            now = f"{self._history.slots_used / self.policy.slots:.1f} replicas"
            return f"the best fixed size so far; following the demand (now {now}) costs more"
        share = self._ledger.relative_cost(self._price_s)
        factor = self._windows.get(followed.name)
        source = f"demand of the last {factor * self.policy.window_s:.0f} s" if factor else followed.name
        return f"follows the {source}, at {share:.0%} of the cost of the best fixed size, {self._fixed}"

    def _clamped(self, size: int) -> int:
        return max(self.policy.min_replicas, min(self.policy.max_replicas, size))


def _problem(last: FleetSnapshot, now: FleetSnapshot) -> str:
    """Return why a snapshot cannot be compared with the last one; empty: it can be."""
    if (age_s := now.at_s - now.metrics_s) > _STALE_S:
        return f"the request counts are stale ({age_s:.0f} s old, limit {_STALE_S:.0f} s)"
    if now.at_s <= last.at_s:
        return f"the clock went back {last.at_s - now.at_s:.0f} s"
    if now.at_s - last.at_s > _MAX_INTERVAL_S:
        return f"{now.at_s - last.at_s:.0f} s without a snapshot (limit {_MAX_INTERVAL_S:.0f} s)"
    if now.arrived < last.arrived:
        return "the request counts began again"
    return ""
