"""Continuous batching without a clock: which requests are in each step, as in vLLM and in llama.cpp's server."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from powerband.testing.lab.truth import StepTimes


@dataclass(slots=True, eq=False)
class Request:
    """One request, with the tokens that it will generate, and its progress."""

    prompt: Sequence[int]
    output: Sequence[int]
    generated: int = 0  # output tokens
    computed: int = 0  # tokens whose keys and values are in the cache
    cached: int | None = None  # prompt tokens found in the prefix cache; None: it was never admitted
    blocks: list[int | None] = field(default_factory=list)  # the keys of its blocks; None: of no use to others
    _keys: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Return its prompt tokens and the output tokens generated so far."""
        return len(self.prompt) + self.generated

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return a part of its prompt and output."""
        before = len(self.prompt)
        return (*self.prompt[start:end], *self.output[max(0, start - before) : max(0, end - before)])

    def block_key(self, index: int, block_tokens: int) -> int:
        """Return the hash of a whole block of tokens and of all tokens before it."""
        while len(self._keys) <= index:
            start = len(self._keys) * block_tokens
            last = self._keys[-1] if self._keys else 0
            self._keys.append(hash((last, self.tokens(start, start + block_tokens))))
        return self._keys[index]


class PagedCache:
    """vLLM's KV cache: blocks of a pool; a block that no request uses stays in the prefix cache until it is needed."""

    def __init__(self, *, blocks: int, block_tokens: int = 16, prefix_caching: bool = True) -> None:
        self.blocks, self.block_tokens, self.prefix_caching = blocks, block_tokens, prefix_caching
        self._held: dict[int, int] = {}  # the requests that use each block with a key
        self._idle: dict[int, None] = {}  # keys of unused blocks, least recently used first
        self._private = 0  # blocks without a key

    @property
    def free(self) -> int:
        """Return the blocks that no request uses."""
        return self.blocks - len(self._held) - self._private

    @property
    def usage(self) -> float:
        """Return the share of blocks in use."""
        return 1 - self.free / self.blocks

    def holds(self, tokens: int) -> bool:
        """Return whether one request of this many tokens fits into the empty cache."""
        return -(-tokens // self.block_tokens) <= self.blocks

    def admit(self, request: Request) -> bool:
        """Give a request the cached blocks of its prefix; False if its known tokens do not all fit."""
        keys: list[int] = []
        if self.prefix_caching:
            for index in range((request.known - 1) // self.block_tokens):  # the last token is always computed
                key = request.block_key(index, self.block_tokens)
                if key not in self._held and key not in self._idle:
                    break
                keys.append(key)
        unused = sum(key in self._idle for key in keys)
        if -(-request.known // self.block_tokens) - len(keys) + unused > self.free:
            return False
        for key in keys:
            self._idle.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        request.blocks = list(keys)
        request.computed = len(keys) * self.block_tokens
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Give a request the blocks for its next tokens; False if there are too few."""
        end = request.computed + tokens
        needed = -(-end // self.block_tokens) - len(request.blocks)
        if needed > self.free:
            return False
        for _ in range(len(self._held) + len(self._idle) + self._private + needed - self.blocks):
            del self._idle[next(iter(self._idle))]
        self._private += needed
        request.blocks += [None] * needed
        if self.prefix_caching:
            for index in range(request.computed // self.block_tokens, end // self.block_tokens):
                key = request.block_key(index, self.block_tokens)
                if key not in self._held and key not in self._idle:
                    request.blocks[index] = key
                    self._held[key] = 1
                    self._private -= 1
        return True

    def release(self, request: Request) -> None:
        """Take all blocks of a request; the end of a prefix is evicted before its beginning."""
        for key in reversed(request.blocks):
            if key is None:
                self._private -= 1
            elif self._held[key] > 1:
                self._held[key] -= 1
            else:
                del self._held[key]
                self._idle[key] = None
        request.blocks = []


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of llama.cpp's server; the tokens of its last request are its prefix cache."""

    request: Request | None = None
    tokens: tuple[int, ...] = ()
    released: int = -1  # by the number of releases before it


class SlotCache:
    """llama.cpp's KV cache: slots of equal context that share nothing."""

    _SIMILAR = 0.1  # of the prompt: llama.cpp's default for the choice of a slot by its prefix

    def __init__(self, *, slots: int, context_per_slot: int, prefix_caching: bool = True) -> None:
        self.slots = tuple(Slot() for _ in range(slots))
        self.context_per_slot, self.prefix_caching = context_per_slot, prefix_caching
        self._of: dict[Request, Slot] = {}
        self._releases = 0

    @property
    def usage(self) -> float:
        """Return the share of the context in use."""
        return sum(one.computed for one in self._of) / (len(self.slots) * self.context_per_slot)

    def holds(self, tokens: int) -> bool:
        """Return whether one request of this many tokens fits into a slot."""
        return tokens <= self.context_per_slot

    def admit(self, request: Request) -> bool:
        """Give a request the free slot with the most similar prefix, or the least recently used; False if none."""
        free = [slot for slot in self.slots if slot.request is None]
        if not free:
            return False
        tokens = request.tokens(0, request.known)
        common = {slot: _common(slot.tokens, tokens) if self.prefix_caching else 0 for slot in free}
        best = max(free, key=common.__getitem__)
        if common[best] <= self._SIMILAR * len(tokens):
            best = min(free, key=lambda slot: slot.released)
        best.request, self._of[request] = request, best
        request.computed = min(common[best], request.known - 1)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Return True: the context of a slot is reserved."""
        return True

    def release(self, request: Request) -> None:
        """Free the slot of a request; its tokens stay until the slot is used again."""
        slot = self._of.pop(request)
        slot.request, slot.tokens, slot.released = None, request.tokens(0, request.computed), self._releases
        self._releases += 1


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    duration_s: float
    decode_sequences: int
    prefill_tokens: int
    admitted: tuple[Request, ...]
    tokens: tuple[Request, ...]  # requests that get an output token at the end of the step
    finished: tuple[Request, ...]  # of these, those for which it is the last


class Batching:
    """The scheduler: first the running requests, oldest first, then waiting ones, until a step has no tokens left.

    If blocks run out, the newest running request is preempted: it returns to the head of the queue and is computed
    again. A prompt is computed in chunks.
    """

    def __init__(
        self, times: StepTimes, cache: PagedCache | SlotCache, *, max_batched_tokens: int, max_sequences: int
    ) -> None:
        self.times, self.cache = times, cache
        self.max_batched_tokens, self.max_sequences = max_batched_tokens, max_sequences
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.prefix_queries_tokens = self.prefix_hits_tokens = 0
        self._finished: list[Request] = []

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        tokens = len(request.prompt) + len(request.output)
        if not self.cache.holds(tokens):
            raise ValueError(f"a request of {tokens} tokens never fits into the KV cache")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Remove a request that nobody waits for any more."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request)
            self._finished = [one for one in self._finished if one is not request]
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> Step | None:
        """Return the next step; None: there is nothing to compute. What ends with a step is freed by the next call."""
        for request in self._finished:
            self.running.remove(request)
            self.cache.release(request)
        batch, preempted = self._continue()
        admitted = [] if preempted else self._admit(batch)
        self._finished = []
        tokens: list[Request] = []
        decodes = decode_context = prefill = 0
        for request, count in batch:
            if count == 1 and request.generated:
                decodes += 1
                decode_context += request.computed
            else:
                prefill += count
            request.computed += count
            if request.computed == request.known:
                request.generated += 1
                tokens.append(request)
                if request.generated == len(request.output):
                    self._finished.append(request)
        if not batch:
            return None
        duration_s = self.times.step_s(decodes, prefill, decode_context / max(1, decodes))
        return Step(duration_s, decodes, prefill, tuple(admitted), tuple(tokens), tuple(self._finished))

    def _continue(self) -> tuple[list[tuple[Request, int]], bool]:
        """Return the running requests with their tokens in this step, and whether one was preempted."""
        batch: list[tuple[Request, int]] = []
        budget, preempted = self.max_batched_tokens, False
        while len(batch) < len(self.running) and budget:
            request = self.running[len(batch)]
            count = min(request.known - request.computed, budget)
            if self.cache.grow(request, count):
                batch.append((request, count))
                budget -= count
                continue
            newest = self.running.pop()
            self.cache.release(newest)
            newest.computed = 0
            self.waiting.appendleft(newest)
            self.preemptions += 1
            preempted = True
        return batch, preempted

    def _admit(self, batch: list[tuple[Request, int]]) -> list[Request]:
        """Add waiting requests to a batch and return them."""
        admitted: list[Request] = []
        budget = self.max_batched_tokens - sum(count for _, count in batch)
        while self.waiting and budget and len(self.running) < self.max_sequences:
            request = self.waiting[0]
            if not self.cache.admit(request):
                break
            count = min(request.known - request.computed, budget)
            self.cache.grow(request, count)  # cannot fail: all its tokens fit
            if request.cached is None:
                request.cached = request.computed
                self.prefix_queries_tokens += len(request.prompt)
                self.prefix_hits_tokens += request.computed
            self.running.append(self.waiting.popleft())
            admitted.append(request)
            batch.append((request, count))
            budget -= count
        return admitted


@dataclass(frozen=True)
class Latencies:
    """Mean latencies of a load."""

    ttft_s: float
    tpot_s: float


def closed_loop(
    batching: Batching,
    *,
    users: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    spread: float = 0.0,
) -> Latencies:
    """Simulate users who all start at once and send their next request when the last one is answered.

    Lengths are uniform, up to a share `spread` above and below their means.
    """
    draw = random.Random(0)
    delay_s, now_s, sent, ended = batching.times.request_s, 0.0, 0, 0
    arriving: deque[tuple[float, Request]] = deque()  # in the order of their times, as the delay is constant
    sent_s: dict[Request, float] = {}
    first_s: dict[Request, float] = {}
    ttft_s = tpot_s = 0.0
    while ended < requests:
        while sent < min(requests, ended + users):
            start = 2 * sent * prompt_tokens
            prompt, output = (
                round(mean * draw.uniform(1 - spread, 1 + spread)) for mean in (prompt_tokens, output_tokens)
            )
            request = Request(range(start, start + prompt), range(output))
            arriving.append((now_s + delay_s, request))
            sent_s[request] = now_s
            sent += 1
        while arriving and arriving[0][0] <= now_s:
            batching.add(arriving.popleft()[1])
        step = batching.step()
        if step is None:
            now_s = arriving[0][0]
            continue
        now_s += step.duration_s
        for request in step.tokens:
            if request.generated == 1:
                first_s[request] = now_s
        for request in step.finished:
            ended += 1
            ttft_s += first_s[request] - sent_s[request]
            tpot_s += (now_s - first_s[request]) / max(1, request.generated - 1)
    return Latencies(ttft_s / requests, tpot_s / requests)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
