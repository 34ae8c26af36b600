"""Control a level while it runs: end its warm-up, delimit its window, and stop it once its verdict is clear."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from powerband import metrics
from powerband.bench import sequential
from powerband.core.measurement import describe_load
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload
from powerband.load import prompts
from powerband.load.generator import LoadProgress

_MIN_WARMUP_S = 1.0
_USUAL_WARMUP_S, MAX_WARMUP_S = 15.0, 60.0  # up to the maximum if answers take long
_WARMUP_SESSIONS, _MAX_SESSION_S = 3, 300.0  # sessions that must end before the window opens, and the timeout for it
_FIRST_ANSWERS = 10  # their duration is free of queueing: no queue has built up yet
MIN_DRAIN_S = 10.0
_SATURATED_TICKS = 20  # of 50 ms
_SATURATION_FACTOR = 3  # queueing time over its SLO bound
_MIN_WINDOW_ANSWERS = 1  # of a window that ends before it has all its requests
_MAX_AWAITING = 1  # requests without a first token when a level is decided as met


@dataclass(frozen=True)
class Plan:
    """A load to apply, as a rate or a number of users, and how much of it to measure."""

    workload: Workload
    window_s: float
    requests: int  # approximate number within the window
    stop_early: bool = False  # stop once the SLO is out of reach
    by_count: bool = False  # the window ends after `requests` requests instead of `window_s`
    max_window_s: float | None = None  # of a closed loop: its window ends then, with fewer requests
    decide: bool = False  # stop once the verdict is clear either way, with the error of a sequential test


@dataclass(frozen=True)
class LevelStatus:
    """How far a level is, for a progress display."""

    load: str
    phase: Literal["warming up", "measuring", "draining"]
    done: int  # answers within the window
    needed: int  # approximate number of answers that the window needs
    in_flight: int
    remaining_s: float | None = None  # estimate; None: unknown


@dataclass
class _Late:
    """Answers beyond one bound of the SLO, and beyond the bounds that a sequential decision uses."""

    answers: int = 0
    by_tight_bound: int = 0
    by_wide_bound: int = 0

    def count(self, values: Iterable[float], limit: float) -> None:
        for value in values:
            self.answers += value > limit
            self.by_tight_bound += value > limit / sequential.MARGIN
            self.by_wide_bound += value > limit * sequential.MARGIN


class LevelController:
    """Decide after every tick of a level whether to stop it, and track its warm-up and window."""

    def __init__(self, plan: Plan, traffic: prompts.Traffic, *, slo: SLO | None, stopping: threading.Event) -> None:
        self.plan, self.traffic, self.slo, self.stopping = plan, traffic, slo, stopping
        self.users = prompts.users(plan.workload)
        self.in_sessions = traffic.turns > 1 and not self.users
        self.window_start_s: float | None = None
        self.known_end_s: float | None = None  # end of the window, once it is known
        self.window_answers = 0
        self.in_flight: list[tuple[float, int]] = []  # (elapsed_s, requests in flight)
        self.early: str | None = None  # why the level was stopped early
        self.decided: str | None = None  # why the SLO counts as met before the end of the window
        self.died: str | None = None
        self.longest_answer_s = self.unqueued_answer_s = 0.0
        self.sessions_s: list[float] = []  # durations of the sessions that have ended
        self.users_answered = 0  # users with at least one answer
        self._first_answers_s: float | None = None  # when the first answers were complete; later ones are judged
        self._judged = 0  # answers judged: before the window opens, then within it
        self._late = [_Late() for _ in slo.bounds()] if slo else []  # of these, beyond each bound
        self._saturated_ticks = 0
        self._rows_seen = 0
        self._in_flight_before = 0  # when the window opened

    @property
    def window_end_s(self) -> float:
        """Return when the window ends; an estimate until the end is known."""
        if self.known_end_s is not None:
            return self.known_end_s
        return (self.window_start_s if self.window_start_s is not None else MAX_WARMUP_S) + self.plan.window_s

    @property
    def load(self) -> str:
        """Return the load as text."""
        return describe_load(self.users, self._planned_rate)

    def status(self, progress: LoadProgress) -> LevelStatus:
        """Return how far the level is."""
        now, done, needed = progress.elapsed_s, self.window_answers, self.plan.requests
        remaining_s = None
        if self.window_start_s is None:
            phase: Literal["warming up", "measuring", "draining"] = "warming up"
        elif self.known_end_s is None and self.plan.by_count:
            phase = "measuring"
            remaining_s = max(0, needed - done) * (now - self.window_start_s) / done if done else None
        elif now < self.window_end_s:
            phase, remaining_s = "measuring", self.window_end_s - now
        else:
            phase = "draining"
        return LevelStatus(self.load, phase, min(done, needed), needed, progress.in_flight, remaining_s)

    @property
    def _planned_rate(self) -> float:
        return self.plan.requests / self.plan.window_s

    def __call__(self, progress: LoadProgress, records: Records) -> bool:
        now = progress.elapsed_s
        self.in_flight.append((now, progress.in_flight))
        self._read_new(records)
        if self._first_answers_s is None and len(records) >= _FIRST_ANSWERS:
            self._first_answers_s = now
        self._count_late(records)
        self._rows_seen = len(records)
        if self.died:
            self.early = f"the engine died ({self.died})"
        elif self.stopping.is_set():
            self.early = "interrupted"
        elif self.plan.stop_early and (reason := self._saturated(progress)):
            self.early = reason
        elif self.plan.stop_early and (reason := self._too_many_late()):
            self.early, self.window_start_s = reason, self._judged_since_s
        elif self.plan.decide and self.window_start_s is not None:
            self._decide(progress)
        if self.early or self.decided:
            self.window_start_s = self.window_start_s if self.window_start_s is not None else now
            self.known_end_s = now if self.decided else self.known_end_s
            return True
        if self.window_start_s is None:
            if self._is_warm(now, len(records)):
                self._open_window(now)
            return False
        if self.users:
            over = self.window_answers >= self.plan.requests if self.plan.by_count else now >= self.window_end_s
            if self.plan.max_window_s and self.window_answers >= _MIN_WINDOW_ANSWERS:
                over = over or now >= self.window_start_s + self.plan.max_window_s
            self.known_end_s = now if over else None
            return over
        if self.plan.by_count and self.known_end_s is None:  # the due times of later turns depend on the answers
            if self.window_answers < self.plan.requests and now < self.window_start_s + 2 * self.plan.window_s:
                return False
            self.known_end_s = now
        if now < self.window_end_s:
            return False
        drain_timeout_s = max(MIN_DRAIN_S, self.plan.window_s, min(MAX_WARMUP_S, self._longest_s))
        return now > self.window_end_s + drain_timeout_s or not self._unanswered(progress, records)

    @property
    def _longest_s(self) -> float:
        """Return the longest answer so far, with a margin."""
        return 1.5 * self.longest_answer_s

    def _read_new(self, records: Records) -> None:
        key = records["end"] if self.users else records["due"]
        for row in range(self._rows_seen, len(records)):
            self.longest_answer_s = max(self.longest_answer_s, (records["end"][row] - records["sent"][row]) / 1e9)
            self.unqueued_answer_s = self.longest_answer_s if row < _FIRST_ANSWERS else self.unqueued_answer_s
            self.window_answers += self.window_start_s is not None and key[row] >= self.window_start_s * 1e9
            session, turn = divmod(records["number"][row], self.traffic.turns)
            self.users_answered += session < self.users and not turn
            if self.in_sessions and turn == self.traffic.turns - 1:
                self.sessions_s.append(records["end"][row] / 1e9 - self.traffic.due_s[session])

    def _is_warm(self, now: float, finished: int) -> bool:
        """Return whether the load is steady: the time of one answer has passed and the queue does not grow."""
        if self.users:  # all users start at once, so their first answers queue behind each other
            return now >= (_MIN_WARMUP_S if self.users_answered >= self.users else _MAX_SESSION_S)
        if self.in_sessions and not self._sessions_overlap(now):
            return now >= _MAX_SESSION_S
        if now >= min(MAX_WARMUP_S, max(_USUAL_WARMUP_S, 2 * self.unqueued_answer_s, self._longest_s)):
            return True
        if now < _MIN_WARMUP_S or finished < 5 or now < self._longest_s:
            return False
        second, third = bisect_left(self.in_flight, (now / 3, 0)), bisect_left(self.in_flight, (2 * now / 3, 0))
        earlier = [count for _, count in self.in_flight[second:third]] or [0]
        lately = [count for _, count in self.in_flight[third:]] or [0]
        before, after = sum(earlier) / len(earlier), sum(lately) / len(lately)
        return after <= before * 1.15 + 2

    def _sessions_overlap(self, now: float) -> bool:
        """Return whether sessions have ended, so that all turns are present and the rate has reached its plan."""
        return len(self.sessions_s) >= _WARMUP_SESSIONS and now >= 1.5 * max(self.sessions_s)

    def _open_window(self, now: float) -> None:
        """Start the window; if the due times are known in advance, so is the end of a window by count."""
        self._in_flight_before = self.in_flight[-1][1]
        self.window_start_s, self._judged, self._late = now, 0, [_Late() for _ in self._late]
        if self.plan.by_count and not self.users and self.traffic.turns == 1:
            last = bisect_left(self.traffic.due_s, now) + self.plan.requests
            self.known_end_s = self.traffic.due_s[min(last, len(self.traffic) - 1)]

    def _saturated(self, progress: LoadProgress) -> str | None:
        """Return a reason if, by Little's law, the queue implies a latency far above its bound."""
        if not self.slo or self.users:
            return None
        queues = ((self.slo.ttft, progress.awaiting_first_token), (self.slo.e2e, progress.in_flight))
        limits = [
            (count, _SATURATION_FACTOR * max(bounds.values()) * self._planned_rate + 5)
            for bounds, count in queues
            if bounds
        ]
        exceeded = [(count, limit) for count, limit in limits if count > limit]
        self._saturated_ticks = self._saturated_ticks + 1 if exceeded else 0
        if self._saturated_ticks < _SATURATED_TICKS:
            return None
        count, limit = exceeded[0]
        return f"saturated: {count} requests waiting, limit {limit:.0f} for this SLO"

    @property
    def _judged_since_s(self) -> float | None:
        """Return the time from which answers are judged."""
        return self.window_start_s if self.window_start_s is not None else self._first_answers_s

    def _count_late(self, records: Records) -> None:
        since_s = self._judged_since_s
        if not self.slo or not self.plan.stop_early or since_s is None or self._rows_seen == len(records):
            return
        new = range(self._rows_seen, len(records))
        judged = records.select(row for row in new if records["due"][row] >= since_s * 1e9 and records["first"][row])
        self._judged += len(judged)
        for index, (metric, _, limit) in enumerate(self.slo.bounds()):
            if metric in metrics.PER_REQUEST:
                self._late[index].count(metrics.PER_REQUEST[metric](judged), limit)

    def _too_many_late(self) -> str | None:
        """Return a reason if more answers are beyond a bound than the SLO allows for the whole window.

        Before the window opens the load is below its plan: if most answers are late even then, the SLO is out of reach.
        This does not hold for closed-loop users, who all start at once.
        """
        min_late = 0.0
        if self.window_start_s is None:
            min_late = math.inf if self.users else self._judged / 2
        for late, (metric, p, limit) in zip(self._late, self.slo.bounds() if self.slo else (), strict=True):
            allowed = max((1 - p) * self.plan.requests, min_late) + 1
            if late.answers > allowed:
                return f"{late.answers} late answers ({metric.upper()} above {limit:g} s), limit {math.floor(allowed)}"
        return None

    def _decide(self, progress: LoadProgress) -> None:
        """Stop if the verdict of the whole window can be predicted.

        The SLO counts as met only while no queue grows, which would hold the late answers: no request waits for its
        first token, and about as many are in flight as when the window opened.
        """
        assert self.slo is not None
        requests, error = self.plan.requests, f"error {sequential.ERROR:.0%}"
        verdicts = []
        for late, (metric, p, limit) in zip(self._late, self.slo.bounds(), strict=True):
            per_request = metric in metrics.PER_REQUEST
            verdicts.append(per_request and sequential.meets(late.by_tight_bound, self._judged, requests, 1 - p))
            if per_request and sequential.misses(late.by_wide_bound, self._judged, requests, 1 - p):
                counts = f"{late.answers} of {self._judged} answers late ({metric.upper()} above {limit:g} s)"
                self.early = f"{counts}, {error}"
                return
        grown = progress.in_flight - self._in_flight_before > 2 * math.sqrt(self._in_flight_before + 1)
        if all(verdicts) and progress.awaiting_first_token <= _MAX_AWAITING and not grown:
            self.decided = f"met after {self._judged} of {requests} requests, {error}"

    def _unanswered(self, progress: LoadProgress, records: Records) -> bool:
        """Return whether a request of the window is still unanswered."""
        if self.traffic.turns > 1:  # the due times of later turns depend on the answers
            return progress.elapsed_s < self.window_end_s + self._longest_s
        end = bisect_left(self.traffic.due_s, self.window_end_s)
        finished = sum(1 for number in records["number"] if number < end)
        return finished < end
