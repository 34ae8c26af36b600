"""Play a workload through an engine's scheduler: continuous batching, chunked prefill, a bounded KV cache.

Between two events (an arrival, an end) the batch does not change, so its steps are taken in one go: a thousand requests
cost milliseconds, and percentiles come out where a formula gives means.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from powerband.plan.step_work import Batch


@dataclass(frozen=True)
class Limits:
    """What the engine's scheduler allows."""

    sequences: int  # answers that are written at once
    batched_tokens: int  # tokens of one step
    kv_tokens: float  # tokens that the KV cache holds
    request_s: float = 0.0  # before a request reaches the queue
    tokens_per_step: float = 1.0  # more than one with speculation


@dataclass
class Outcome:
    """What each request got, in the order of arrival; a request that never fits is not in it."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    refused: int = 0
    waiting_s: float = 0.0  # how long the last request waited for its first token


@dataclass
class _Prompt:
    number: int
    due: float
    left: float  # tokens still to compute
    done: float  # tokens that are in the cache
    output: int


def simulate(
    due: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    step_s: Callable[[Batch], float],
    limits: Limits,
    *,
    known_share: float = 0.0,
    warm: int = 0,
) -> Outcome:
    """Serve the requests and return what each of them got; the first `warm` of them are not told."""
    count = len(due)
    ttft, ends = array("d", bytes(8 * count)), array("d", bytes(8 * count))
    waiting: deque[_Prompt] = deque()
    reading: deque[_Prompt] = deque()  # prompts that are being computed
    writing: list[tuple[float, int, float]] = []  # (step at which it ends, number, tokens it holds then)
    now, step, arrived, held, context, refused = 0.0, 0.0, 0, 0.0, 0.0, 0
    served = [False] * count
    rate = limits.tokens_per_step

    def admit() -> None:
        nonlocal held, refused
        while waiting and len(writing) + len(reading) < limits.sequences:
            first = waiting[0]
            need = first.left + first.done + first.output
            if need > limits.kv_tokens:
                waiting.popleft()
                refused += 1
                continue
            if held + need > limits.kv_tokens:
                return
            held += need
            reading.append(waiting.popleft())

    while arrived < count or waiting or reading or writing:
        while arrived < count and due[arrived] + limits.request_s <= now:
            known = known_share * prompts[arrived]
            waiting.append(_Prompt(arrived, due[arrived], prompts[arrived] - known, known, outputs[arrived]))
            arrived += 1
        admit()
        decodes = len(writing)
        if reading:
            budget, chunk, behind, firsts = max(1.0, limits.batched_tokens - decodes), 0.0, 0.0, 0
            finished: list[_Prompt] = []
            while reading and budget > 0:
                prompt = reading[0]
                part = min(budget, prompt.left)
                behind += part * (prompt.done + part / 2)
                chunk, budget = chunk + part, budget - part
                prompt.left, prompt.done = prompt.left - part, prompt.done + part
                if prompt.left > 0:
                    break
                finished.append(reading.popleft())
                firsts += 1
            mean = context / decodes if decodes else 0.0
            now += step_s(Batch(chunk, behind / chunk if chunk else 0.0, decodes, mean, firsts))
            step += 1
            context += decodes * rate
            for prompt in finished:
                ttft[prompt.number] = now - prompt.due
                left = max(0, prompt.output - 1) / rate
                heapq.heappush(writing, (step + left, prompt.number, prompt.done + prompt.output))
                context += prompt.done + 1
        elif writing:
            until_end = max(1.0, -(-(writing[0][0] - step) // 1))
            mean = context / decodes
            each = step_s(Batch(decodes=decodes, context=mean + until_end * rate / 2))
            steps = until_end
            if arrived < count:
                gap = due[arrived] + limits.request_s - now
                steps = max(1.0, min(until_end, -(-gap // each)))
            now += steps * each
            step += steps
            context += steps * decodes * rate
        elif arrived < count:
            now = due[arrived] + limits.request_s
            continue
        while writing and writing[0][0] <= step + 1e-9:
            _, number, tokens = heapq.heappop(writing)
            ends[number], served[number] = now, True
            held -= tokens
            context = max(0.0, context - tokens)
    found = Outcome(refused=refused)
    for number in range(warm, count):
        if served[number]:
            whole = ends[number] - due[number]
            found.ttft.append(ttft[number])
            found.e2e.append(whole)
            if outputs[number] > 1:
                found.tpot.append((whole - ttft[number]) / (outputs[number] - 1))
    found.waiting_s = found.ttft[-1] if found.ttft else 0.0
    return found
