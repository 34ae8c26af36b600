"""Send traffic on schedule: every request is sent at its due time, independent of the server's answers."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from powerband.core.records import FINISHES, OUTCOMES, Records
from powerband.load import prompts, wire
from powerband.load.prompts import Messages, Traffic
from powerband.load.python_wire import Finished
from powerband.load.wire import Target

_MAX_AHEAD_BYTES = 128 * 2**20  # of requests encoded before they are due
_AHEAD_REQUESTS = 1000  # encoded ahead in a closed loop
_MAX_AHEAD_S, _MIN_AHEAD_S = 5.0, 1.0  # how long before its due time a request is encoded
_START_DELAY_NS = 50_000_000
_TICK_S = 0.05
_DRAIN_TIMEOUT_S = 10.0


@dataclass
class LoadProgress:
    """The progress of a run."""

    elapsed_s: float = 0.0
    finished: int = 0
    in_flight: int = 0
    awaiting_first_token: int = 0  # requests in flight without a first token


@dataclass
class Run:
    """The result of a run: its records, and statistics about the client."""

    records: Records = field(default_factory=Records)
    started_ns: int = 0
    prepared_s: float = 0.0
    elapsed_s: float = 0.0
    client_cpu_s: float = 0.0  # of the busiest sender thread
    worst_wake_s: float = 0.0  # longest delay of a timer wake-up
    errors: dict[str, int] = field(default_factory=dict)
    unsent_due: array[int] = field(default_factory=lambda: array("q"))  # due times of requests that were never sent


def drive(
    target: Target,
    traffic: Traffic,
    *,
    max_in_flight: int = 0,
    senders: int = 1,
    until: Callable[[LoadProgress, Records], bool] = lambda *_: False,
) -> Run:
    """Send the traffic and record the answers, until all requests are answered or `until` returns true."""
    run, began = Run(), time.monotonic()
    transport = wire.connect(target, max_in_flight=max_in_flight, senders=senders, turns=traffic.turns)
    try:
        sender = _Sender(transport, target, traffic)
        sender.top_up()
        if target.keep_alive:
            transport.warm(min(1024, prompts.users(traffic.workload) or 16))
        run.prepared_s = time.monotonic() - began
        run.started_ns = time.monotonic_ns() + _START_DELAY_NS
        sender.start(run.started_ns)
        try:
            _follow(transport, sender, run, until)
        finally:
            _drain(transport, sender, run)
            state = transport.state()
            run.client_cpu_s, run.worst_wake_s = state["cpu_ns"] / 1e9, state["worst_wake_ns"] / 1e9
            run.elapsed_s = (time.monotonic_ns() - run.started_ns) / 1e9
    finally:
        transport.close()
    return run


def _follow(transport: Any, sender: _Sender, run: Run, until: Callable[[LoadProgress, Records], bool]) -> None:
    progress = LoadProgress()
    while sender.open:
        for finished in transport.collect(_TICK_S):
            sender.finish(Finished(*finished), run)
        sender.top_up()
        state = transport.state()
        progress.elapsed_s = (time.monotonic_ns() - run.started_ns) / 1e9
        progress.finished, progress.in_flight = len(run.records), state["in_flight"]
        progress.awaiting_first_token = state["silent"]
        if until(progress, run.records):
            return


def _drain(transport: Any, sender: _Sender, run: Run) -> None:
    """Cancel the remaining requests and record those that were in flight."""
    transport.stop()
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S  # not a number of calls: each may return only a few requests
    while sender.outstanding and time.monotonic() < deadline:
        for finished in transport.collect(_TICK_S):
            sender.finish(Finished(*finished), run, follow=False)


class _Sender:
    """Encode requests before they are due, within a memory limit, and submit them to the wire."""

    def __init__(self, transport: Any, target: Target, traffic: Traffic) -> None:
        self.transport, self.target, self.traffic = transport, target, traffic
        self.users, self.turns = prompts.users(traffic.workload), traffic.turns
        self.outstanding: dict[int, int] = {}  # request id -> encoded bytes
        self.bytes_ahead, self.next, self.start_ns = 0, 0, 0
        self.waiting: list[tuple[int, bytes]] = []  # encoded before the run starts
        self.chats: dict[int, Messages] = {}  # of unfinished sessions, by session number
        self.path = "/v1/chat/completions" if traffic.workload.api == "chat" else "/v1/completions"
        self.think_ns = int((traffic.workload.turns.think_s if traffic.workload.turns else 0) * 1e9)

    @property
    def open(self) -> bool:
        """Return whether any request is still to be sent or answered."""
        return bool(self.outstanding) or self.next < len(self.traffic)

    def start(self, start_ns: int) -> None:
        """Start the run at this time and submit the requests encoded so far."""
        self.start_ns = start_ns
        for number, data in self.waiting:
            self._submit(number, data)
        self.waiting.clear()

    def top_up(self) -> None:
        """Encode the next requests, up to the limits on memory and lead time."""
        by_users = self.users and self.turns > 1  # a user's next session starts after the last turn of this one
        end = min(len(self.traffic), self.users) if by_users else len(self.traffic)
        now_s = (time.monotonic_ns() - self.start_ns) / 1e9 if self.start_ns else 0.0
        while self.next < end and not self._can_wait(now_s):
            self._open_session(self.next)
            self.next += 1

    def _can_wait(self, now_s: float) -> bool:
        """Return whether encoding the next request can wait; it cannot if the request is due soon."""
        if self.users:  # one request per user before the run starts, more afterwards
            ahead = max(_AHEAD_REQUESTS, 2 * self.users) if self.start_ns else self.users
            return len(self.outstanding) >= ahead
        lead_s = self.traffic.due_s[self.next] - now_s
        return lead_s > _MAX_AHEAD_S or (lead_s > _MIN_AHEAD_S and self.bytes_ahead >= _MAX_AHEAD_BYTES)

    def _open_session(self, number: int, *, due_ns: int | None = None) -> None:
        chat = self.traffic.messages(number)
        if self.turns > 1:
            self.chats[number] = chat
        data = self._encode(number, 0, chat)
        self._count(number * self.turns, data)
        if self.start_ns:
            self._submit(number, data, due_ns=due_ns)
        else:
            self.waiting.append((number, data))

    def _count(self, request: int, data: bytes) -> None:
        self.outstanding[request] = len(data)
        self.bytes_ahead += len(data)

    def _submit(self, number: int, data: bytes, *, due_ns: int | None = None) -> None:
        due = due_ns if due_ns is not None else self.start_ns + int(self.traffic.due_s[number] * 1e9)
        chain = number % self.users if self.users and self.turns == 1 else -1
        self.transport.submit(number * self.turns, due, data, chain, 0, self.turns > 1)

    def _encode(self, number: int, turn: int, chat: Messages) -> bytes:
        traffic, workload = self.traffic, self.traffic.workload
        adapter = traffic.adapters[number] if traffic.adapters else None
        body: dict[str, Any] = {"model": adapter.name if adapter else self.target.model}
        if adapter and adapter.request is not None:
            body |= {"model": self.target.model, **adapter.request}
        if workload.api == "chat":
            body["messages"] = chat
        else:
            body["prompt"] = "\n".join(message["content"] for message in chat)
        body["max_tokens"] = traffic.output_tokens[number * self.turns + turn]
        if workload.ending == "exact":
            body["ignore_eos"] = True
        if workload.temperature is not None:
            body["temperature"] = workload.temperature
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body, separators=(",", ":")).encode()
        return self.target.head(self.path, len(data)) + data

    def finish(self, finished: Finished, run: Run, *, follow: bool = True) -> None:
        """Record a request that has ended, and send the next turn or session that depends on it."""
        request = finished.id
        self.bytes_ahead -= self.outstanding.pop(request, 0)
        if finished.outcome == OUTCOMES.index("cancelled") and not finished.sent:
            run.unsent_due.append(finished.due - self.start_ns)
            return
        lines = list(_json_lines(finished.kept))
        _record(finished, lines, run, start_ns=self.start_ns, max_tokens=self.traffic.output_tokens[request])
        if self.turns > 1 and follow:
            self._next_turn(request, finished, lines)

    def _next_turn(self, request: int, finished: Finished, lines: list[dict[str, Any]]) -> None:
        number, turn = divmod(request, self.turns)
        next_due_ns = finished.end + self.think_ns
        if turn + 1 < self.turns and finished.outcome == 0 and finished.status == 200:
            answer = {"role": "assistant", "content": "".join(map(_content, lines))}
            chat = self.traffic.messages(number, turn=turn + 1, earlier=[*self.chats[number], answer])
            self.chats[number] = chat
            data = self._encode(number, turn + 1, chat)
            self._count(request + 1, data)
            self.transport.submit(request + 1, next_due_ns, data, -1, 0, True)
            return
        self.chats.pop(number, None)
        if self.users and self.next < len(self.traffic):
            self._open_session(self.next, due_ns=next_due_ns)
            self.next += 1


def _json_lines(kept: bytes) -> Iterator[dict[str, Any]]:
    for line in kept.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _content(event: dict[str, Any]) -> str:
    for choice in _choices(event):
        return str(choice.get("text") or _object(choice.get("delta")).get("content") or "")
    return ""


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    found = event.get("choices")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53) else 0.0


def _count(value: Any) -> int:
    """Return a number of tokens or microseconds that the server states; 0 for anything else."""
    number = value if isinstance(value, (int, float)) else 0
    return int(number) if 0 <= number < 2**32 else 0


def _record(finished: Finished, lines: list[dict[str, Any]], run: Run, *, start_ns: int, max_tokens: int) -> None:
    """Add one request to the records."""
    times, status, outcome = array("q", finished.times), finished.status, finished.outcome
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    finish = ""
    for event in lines:
        usage = _object(event.get("usage")) or usage
        timings = _object(event.get("timings")) or timings
        for choice in _choices(event):
            finish = choice.get("finish_reason") or finish
    if outcome or status != 200 or any("error" in event for event in lines):
        error = f"HTTP {status}" if status not in (0, 200) else OUTCOMES[outcome]
        detail = finished.kept.decode("utf-8", "replace")[:200] if status != 200 else ""
        if outcome != OUTCOMES.index("cancelled"):
            key = " ".join(f"{error} {detail}".split())
            run.errors[key] = run.errors.get(key, 0) + 1
    run.records.add(
        (min((later - earlier + 500) // 1000, 2**32 - 1) for earlier, later in pairwise(times)),
        number=finished.id,
        due=finished.due - start_ns,
        sent=finished.sent - start_ns,
        head=finished.head - start_ns if finished.head else 0,
        first=finished.first - start_ns if finished.first else 0,
        end=finished.end - start_ns,
        status=max(0, status),
        outcome=outcome,
        done=1 if finished.done else 0,
        retried=finished.retried,
        asked=max_tokens,
        prompt=_count(usage.get("prompt_tokens")),
        output=_count(usage.get("completion_tokens")),
        chunks=len(times),
        finish=FINISHES.index(finish) if finish in FINISHES else 3,
        engine_us=_count(_number(timings.get("prompt_ms")) * 1000),
    )
