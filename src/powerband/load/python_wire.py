"""The wire in Python: the interface of `_wire.c`, for TLS and for systems where that is not compiled.

It is slower, so the guard against a saturated client fails at a lower load. A response over one of the limits is broken
off, as in `_wire.c`: the server is not trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

ANSWERED, BROKEN_OFF, NOT_CONNECTED, CANCELLED = range(4)
_CONTENT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|arguments)": *"[^"]')
_MAX_HEAD, _MAX_LINE, _MAX_KEPT_LINES = 1 << 16, 8 << 20, 64 << 20  # bytes
_MAX_EVENTS, _MAX_LENGTH = 4 << 20, 1 << 40
_STATUS = re.compile(rb"HTTP/1\.. (\d{3})")
_KEPT = re.compile(rb'"(?:usage|finish_reason|error)": *[^n ]')


class Finished(NamedTuple):
    """The result of one request; times in nanoseconds of the monotonic clock, 0 if the event did not happen."""

    id: int
    due: int
    sent: int
    head: int
    first: int
    end: int
    status: int
    outcome: int
    done: int
    retried: int
    received: int
    times: bytes
    kept: bytes


@dataclass
class _Request:
    id: int
    due: int
    data: bytes
    chain: int
    after: int
    whole: bool
    sent: int = 0
    head: int = 0
    first: int = 0
    end: int = 0
    status: int = 0
    done: int = 0
    retried: int = 0
    received: int = 0
    times: array[int] = field(default_factory=lambda: array("q"))
    kept: list[bytes] = field(default_factory=list)

    def finished(self, outcome: int) -> Finished:
        kept = b"".join(line + b"\n" for line in self.kept)
        end = self.end or time.monotonic_ns()
        common = (self.id, self.due, self.sent, self.head, self.first, end, self.status, outcome)
        return Finished(*common, self.done, self.retried, self.received, self.times.tobytes(), kept)


class Wire:
    """A thread with an event loop that sends requests and reads responses."""

    def __init__(self, host: str, port: str, limit: int = 0, *, tls: str | None = None) -> None:
        self._host, self._port, self._tls = host, int(port), tls
        self._context = ssl.create_default_context() if tls else None
        self._finished: SimpleQueue[Finished] = SimpleQueue()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self._chains: dict[int, deque[_Request]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = self._silent = self._worst_wake = self._cpu_ns = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, id: int, due_ns: int, data: bytes, chain: int, after_ns: int, whole: bool) -> None:
        """Send a request when it is due; requests of one chain are sent one after another."""
        request = _Request(id, due_ns, data, chain, after_ns, bool(whole))
        self._loop.call_soon_threadsafe(self._accept, request)

    def warm(self, count: int) -> None:
        """Open this many idle connections."""

        async def open_all() -> None:
            pairs = await asyncio.gather(*(self._dial() for _ in range(count)), return_exceptions=True)
            self._idle += [pair for pair in pairs if not isinstance(pair, BaseException)]

        asyncio.run_coroutine_threadsafe(open_all(), self._loop).result()

    def collect(self, seconds: float) -> list[Finished]:
        """Return the requests that have ended; wait at most this long for the first."""
        found: list[Finished] = []
        with contextlib.suppress(Empty):
            found.append(self._finished.get(timeout=seconds))
            while True:
                found.append(self._finished.get_nowait())
        return found

    def stop(self) -> None:
        """Cancel all unanswered requests."""

        async def cancel() -> None:
            for chain in self._chains.values():
                while chain:
                    self._finished.put(chain.popleft().finished(CANCELLED))
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()

    def state(self) -> dict[str, int]:
        """Return requests in flight, those without a first token (`silent`), worst wake-up delay and CPU time."""
        counts = {"in_flight": self._in_flight, "silent": self._silent}
        return counts | {"worst_wake_ns": self._worst_wake, "cpu_ns": self._cpu_ns}

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        if self._thread.is_alive():
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for _, writer in self._idle:
            writer.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _accept(self, request: _Request) -> None:
        if request.chain >= 0:
            if request.chain in self._chains:
                self._chains[request.chain].append(request)
                return
            self._chains[request.chain] = deque()
        self._begin(request)

    def _begin(self, request: _Request) -> None:
        task = self._loop.create_task(self._send(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: _Request) -> None:
        outcome = CANCELLED
        try:
            if (wait := request.due - time.monotonic_ns()) > 0:
                await asyncio.sleep(wait / 1e9)
                self._worst_wake = max(self._worst_wake, time.monotonic_ns() - request.due)
            async with self._slots:
                outcome = await self._attempt(request)
        finally:
            self._finished.put(request.finished(outcome))
            self._cpu_ns = time.thread_time_ns()
            if request.chain >= 0 and (chain := self._chains.get(request.chain)) is not None:
                if chain and outcome != CANCELLED:
                    following = chain.popleft()
                    following.due = max(following.due, request.end + following.after)
                    self._begin(following)
                elif not chain:
                    del self._chains[request.chain]

    async def _attempt(self, request: _Request) -> int:
        self._in_flight += 1
        self._silent += 1
        writer = None
        try:
            request.sent = time.monotonic_ns()
            reused = bool(self._idle) and not request.retried
            try:
                reader, writer = self._idle.pop() if reused else await self._dial()
            except OSError:
                request.end = time.monotonic_ns()
                return NOT_CONNECTED
            try:
                writer.write(request.data)
                keep = await self._read(reader, request)
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
                request.end = time.monotonic_ns()
                if reused and not request.received:
                    request.retried = 1
                else:
                    return BROKEN_OFF
            else:
                if keep:
                    self._idle.append((reader, writer))
                    writer = None
                return ANSWERED
        finally:
            if writer is not None:
                writer.close()
            self._in_flight -= 1
            self._silent -= not request.first
        return await self._attempt(request)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self._host, self._port, ssl=self._context, server_hostname=self._tls, limit=1 << 20
        )

    async def _read(self, reader: asyncio.StreamReader, request: _Request) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        request.head = time.monotonic_ns()
        request.received += len(head)
        status = _STATUS.match(head)
        if status is None or b"\0" in head or len(head) > _MAX_HEAD:
            raise ValueError("not the head of a response")
        request.status = int(status[1])
        fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:] if b":" in line)
        events = _Events(request, self)
        keep = b"close" not in fields.get(b"connection", b"")
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            while size := _length((await reader.readline()).split(b";")[0], base=16):
                await _feed(events, reader, size)
                if await reader.readexactly(2) != b"\r\n":
                    raise ValueError("a chunk is longer than its size")
            while (await reader.readline()).strip():
                pass
        elif b"content-length" in fields:
            await _feed(events, reader, _length(fields[b"content-length"]))
        else:
            keep = False
            while data := await reader.read(1 << 16):
                events.feed(data)
        events.feed(b"\n")
        request.end = time.monotonic_ns()
        return keep

    def count_first_token(self) -> None:
        """Record that a request has received its first token."""
        self._silent -= 1


def _length(text: bytes, *, base: int = 10) -> int:
    """Return a length that a server states; raise ValueError if it is none, or over the limit."""
    found = int(text, base)
    if not 0 <= found <= _MAX_LENGTH:
        raise ValueError(f"a length of {found} bytes")
    return found


async def _feed(events: _Events, reader: asyncio.StreamReader, size: int) -> None:
    """Read this many bytes of a body as they arrive."""
    while size:
        data = await reader.read(min(size, 1 << 16))
        if not data:
            raise asyncio.IncompleteReadError(b"", size)
        events.feed(data)
        size -= len(data)


class _Events:
    """Split a stream into server-sent events, timestamp those with content, and keep the lines to parse later."""

    def __init__(self, request: _Request, wire: Any) -> None:
        self._request, self._wire, self._line, self._kept = request, wire, b"", 0

    def feed(self, data: bytes) -> None:
        when, request = time.monotonic_ns(), self._request
        request.received += len(data)
        *lines, self._line = (self._line + data).split(b"\n")
        if max(map(len, (*lines, self._line))) > _MAX_LINE:
            raise ValueError("a line is over the limit")
        for line in lines:
            line = line.rstrip(b"\r")
            if not line.startswith(b"data:"):
                if request.status != 200 and line:
                    self._keep(line)
                continue
            line = line[5:].lstrip(b" ")
            if line == b"[DONE]":
                request.done = 1
                continue
            if _CONTENT.search(line):
                if not request.first:
                    request.first = when
                    self._wire.count_first_token()
                request.times.append(when)
                if len(request.times) > _MAX_EVENTS:
                    raise ValueError("the events are over the limit")
            if request.whole or _KEPT.search(line):
                self._keep(line)

    def _keep(self, line: bytes) -> None:
        self._kept += len(line)
        if self._kept > _MAX_KEPT_LINES:
            raise ValueError("the lines to keep are over the limit")
        self._request.kept.append(line)
