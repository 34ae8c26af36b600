"""Steer a level while it runs: when it is warm, when its window is over, and whether it is hopeless."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from dataclasses import dataclass

from powerband import metrics
from powerband.core.measurement import spoken
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.load import prompts
from powerband.load.generator import LoadProgress

_LEAST_WARM_S = 1.0
_USUAL_WARM_S, MOST_WARM_S = 15.0, 60.0  # the longer one where answers take long
_FIRST_SESSIONS, _MOST_SESSION_S = 3, 300.0  # that must have run their course, and how long that may take
_FIRST_ANSWERS = 10  # how long an answer takes before a queue has built up
LEAST_DRAIN_S = 10.0
_HOPELESS_TICKS = 20  # of 50 ms


@dataclass(frozen=True)
class Plan:
    """What to hold: a rate or a number of users, and how much to measure of it."""

    workload: Workload
    window_s: float
    requests: int  # roughly, within the window
    stop_hopeless: bool = False  # give up early on a load that cannot keep the SLO
    counted: bool = False  # the window ends with so many requests, not by the clock


class LevelController:
    """Decide, while a level runs, when it is warm, when its window is over, and whether it is hopeless."""

    def __init__(self, plan: Plan, traffic: prompts.Traffic, *, slo: SLO | None, stopping: threading.Event) -> None:
        self.plan, self.traffic, self.slo, self.stopping = plan, traffic, slo, stopping
        self.users = prompts.users(plan.workload)
        self.in_sessions = traffic.turns > 1 and not self.users
        self.warm_s: float | None = None
        self.seen: list[tuple[float, int]] = []  # (elapsed, in flight)
        self.hopeless = 0
        self.early: str | None = None
        self.died: str | None = None
        self.longest_s = self.unhurried_s = 0.0
        self.settled_s: float | None = None  # when the first answers were there: later ones tell
        self.judged = 0  # answers: before the window, then of it
        self.beyond = [0] * len(slo.bounds()) if slo else []  # of these, beyond each bound
        self.sessions_s: list[float] = []  # from the first turn to the last, of those that are over
        self.counted = 0  # answers within the window so far
        self.first = 0  # users who were answered once
        self.over_s: float | None = None
        self._looked = 0

    @property
    def end_s(self) -> float:
        """Return when the window ends, or will end by the plan."""
        if self.over_s is not None:
            return self.over_s
        return (self.warm_s if self.warm_s is not None else MOST_WARM_S) + self.plan.window_s

    def __call__(self, progress: LoadProgress, records: Records) -> bool:
        now = progress.elapsed_s
        self.seen.append((now, progress.in_flight))
        key = records["end"] if self.users else records["due"]
        for row in range(self._looked, len(records)):
            self.longest_s = max(self.longest_s, (records["end"][row] - records["sent"][row]) / 1e9)
            self.unhurried_s = self.longest_s if row < _FIRST_ANSWERS else self.unhurried_s
            self.counted += self.warm_s is not None and key[row] >= self.warm_s * 1e9
            session, turn = divmod(records["number"][row], self.traffic.turns)
            self.first += session < self.users and not turn
            if self.in_sessions and turn == self.traffic.turns - 1:
                self.sessions_s.append(records["end"][row] / 1e9 - self.traffic.due_s[session])
        if self.settled_s is None and len(records) >= _FIRST_ANSWERS:
            self.settled_s = now
        self._count_beyond(records)
        self._looked = len(records)
        if self.died:
            self.early = f"the engine died ({self.died})"
        elif self.stopping.is_set():
            self.early = "interrupted"
        elif self.plan.stop_hopeless and self._is_hopeless(progress):
            self.early = "far more requests wait than the SLO allows"
        elif self.plan.stop_hopeless and self._is_lost():
            self.early, self.warm_s = "more answers are late than the SLO allows", self._since_s
        if self.early:
            self.warm_s = self.warm_s if self.warm_s is not None else now
            return True
        if self.warm_s is None:
            if self._is_warm(now, len(records)):
                self._open_window(now)
            return False
        if self.users:
            over = self.counted >= self.plan.requests if self.plan.counted else now >= self.end_s
            self.over_s = now if over else None
            return over
        if self.plan.counted and self.over_s is None:  # of turns nobody knows beforehand when they are due
            if self.counted < self.plan.requests and now < self.warm_s + 2 * self.plan.window_s:
                return False
            self.over_s = now
        if now < self.end_s:
            return False
        patience = max(LEAST_DRAIN_S, self.plan.window_s)
        return now > self.end_s + patience or not self._unanswered(progress, records)

    def _is_warm(self, now: float, finished: int) -> bool:
        """As many leave as arrive: one answer's time has passed, and no more are in flight than a while ago."""
        if self.users:  # all begin at once, and their first answers wait for each other
            return now >= (_LEAST_WARM_S if self.first >= self.users else _MOST_SESSION_S)
        if self.in_sessions and not self._in_every_turn(now):
            return now >= _MOST_SESSION_S
        if now >= min(MOST_WARM_S, max(_USUAL_WARM_S, 2 * self.unhurried_s)):
            return True
        if now < _LEAST_WARM_S or finished < 5 or now < 1.5 * self.longest_s:
            return False
        third = bisect_left(self.seen, (now / 3, 0)), bisect_left(self.seen, (2 * now / 3, 0))
        earlier = [count for _, count in self.seen[third[0] : third[1]]] or [0]
        lately = [count for _, count in self.seen[third[1] :]] or [0]
        before, after = sum(earlier) / len(earlier), sum(lately) / len(lately)
        return after <= before * 1.15 + 2

    def _in_every_turn(self, now: float) -> bool:
        """Sessions have run their course: until then later turns are missing, and less is asked than was meant."""
        return len(self.sessions_s) >= _FIRST_SESSIONS and now >= 1.5 * max(self.sessions_s)

    def _open_window(self, now: float) -> None:
        """Begin to measure; where arrivals are known beforehand, so is the one that ends the window."""
        self.warm_s, self.judged, self.beyond = now, 0, [0] * len(self.beyond)
        if self.plan.counted and not self.users and self.traffic.turns == 1:
            last = bisect_left(self.traffic.due_s, now) + self.plan.requests
            self.over_s = self.traffic.due_s[min(last, len(self.traffic) - 1)]

    def _is_hopeless(self, progress: LoadProgress) -> bool:
        """By Little's law, this many waiting at this rate means a latency of three times its bound."""
        if not self.slo or self.users:
            return False
        rate = self.plan.requests / self.plan.window_s
        waiting = ((self.slo.ttft, progress.silent), (self.slo.e2e, progress.in_flight))
        crowded = any(bounds and count > 3 * max(bounds.values()) * rate + 5 for bounds, count in waiting)
        self.hopeless = self.hopeless + 1 if crowded else 0
        return self.hopeless >= _HOPELESS_TICKS

    @property
    def load(self) -> str:
        """Return the load in words."""
        return spoken(self.users, self.plan.requests / self.plan.window_s)

    @property
    def _since_s(self) -> float | None:
        """Return from when on requests are judged."""
        return self.warm_s if self.warm_s is not None else self.settled_s

    def _count_beyond(self, records: Records) -> None:
        since_s = self._since_s
        if not self.slo or not self.plan.stop_hopeless or since_s is None or self._looked == len(records):
            return
        fresh = range(self._looked, len(records))
        inside = records.select(row for row in fresh if records["due"][row] >= since_s * 1e9 and records["first"][row])
        self.judged += len(inside)
        for place, (metric, _, limit) in enumerate(self.slo.bounds()):
            if metric in metrics.PER_REQUEST:
                self.beyond[place] += sum(value > limit for value in metrics.PER_REQUEST[metric](inside))

    def _is_lost(self) -> bool:
        """So many answers of the window are beyond a bound that the rest cannot make up for them.

        Before the window less is asked than was meant: where most are late even so, more will be. Users who all begin
        at once are the exception.
        """
        bounds = self.slo.bounds() if self.slo else ()
        least = 0.0
        if self.warm_s is None:
            least = math.inf if self.users else self.judged / 2
        allowed = (max((1 - p) * self.plan.requests, least) for _, p, _ in bounds)
        return any(late > most + 1 for late, most in zip(self.beyond, allowed, strict=True))

    def _unanswered(self, progress: LoadProgress, records: Records) -> bool:
        """Tell whether a request of the window is still out."""
        if self.traffic.turns > 1:  # later turns are due at times that nobody knows beforehand
            return progress.elapsed_s < self.end_s + 1.5 * self.longest_s
        end = bisect_left(self.traffic.due_s, self.end_s)
        finished = sum(1 for number in records["number"] if number < end)
        return finished < end
