"""Simulate an engine's scheduler on a workload: continuous batching, chunked prefill, a bounded KV cache.

Between two events (an arrival, a finished sequence) the batch does not change, so all decode steps in between are
computed at once. A thousand requests take milliseconds and give percentiles, where a formula gives only means.
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
    """The limits of the engine's scheduler."""

    sequences: int  # that run at once
    batched_tokens: int  # of one step
    kv_tokens: float  # capacity of the KV cache
    request_s: float = 0.0  # before a request reaches the queue
    tokens_per_step: float = 1.0  # of one sequence; more than 1 with speculative decoding


@dataclass
class Outcome:
    """The latencies of each request in order of arrival, without the requests that exceed the KV cache."""

    due: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    rejected: int = 0
    last_ttft_s: float = 0.0  # large if the queue grows


@dataclass
class _Prompt:
    number: int
    due: float
    remaining: float  # tokens still to prefill
    cached: float  # tokens in the KV cache
    output: int


def simulate(
    due: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    step_s: Callable[[Batch], float],
    limits: Limits,
    *,
    cached_share: float = 0.0,
    warmup: int = 0,
    closed: bool = False,
    stop_when: Callable[[float, float, int], bool] | None = None,
) -> Outcome:
    """Return the latencies of the requests, without the first `warmup` of them.

    `cached_share` of every prompt is already in the KV cache. In a `closed` loop `due` has the first request of each
    user; the next one is sent when an answer ends, until all prompts are sent. `stop_when` is called with the TTFT, the
    E2E latency and the output tokens of each counted request; once it returns True, the outcome is empty.
    """
    count, due = len(prompts if closed else due), array("d", due)
    ttft, ends = array("d", bytes(8 * count)), array("d", bytes(8 * count))
    waiting: deque[_Prompt] = deque()
    prefilling: deque[_Prompt] = deque()
    decoding: list[tuple[float, int, float]] = []  # heap of (final step, request, its KV tokens at that step)
    now, step, arrived, reserved, context, rejected = 0.0, 0.0, 0, 0.0, 0.0, 0
    served = [False] * count
    rate = limits.tokens_per_step

    def admit() -> None:
        nonlocal reserved, rejected
        while waiting and len(decoding) + len(prefilling) < limits.sequences:
            first = waiting[0]
            needed = first.remaining + first.cached + first.output
            if needed > limits.kv_tokens:
                waiting.popleft()
                rejected += 1
                continue
            if reserved + needed > limits.kv_tokens:
                return
            reserved += needed
            prefilling.append(waiting.popleft())

    while arrived < len(due) or waiting or prefilling or decoding:
        while arrived < len(due) and due[arrived] + limits.request_s <= now:
            cached = cached_share * prompts[arrived]
            waiting.append(_Prompt(arrived, due[arrived], prompts[arrived] - cached, cached, outputs[arrived]))
            arrived += 1
        admit()
        decodes = len(decoding)
        if prefilling:
            budget, tokens, attended = max(1.0, limits.batched_tokens - decodes), 0.0, 0.0
            finished: list[_Prompt] = []
            while prefilling and budget > 0:
                prompt = prefilling[0]
                chunk = min(budget, prompt.remaining)
                attended += chunk * (prompt.cached + chunk / 2)
                tokens, budget = tokens + chunk, budget - chunk
                prompt.remaining, prompt.cached = prompt.remaining - chunk, prompt.cached + chunk
                if prompt.remaining > 0:
                    break
                finished.append(prefilling.popleft())
            mean = context / decodes if decodes else 0.0
            now += step_s(Batch(tokens, attended / tokens if tokens else 0.0, decodes, mean, len(finished)))
            step += 1
            context += decodes * rate
            for prompt in finished:
                ttft[prompt.number] = now - prompt.due
                final = step + max(0, prompt.output - 1) / rate
                heapq.heappush(decoding, (final, prompt.number, prompt.cached + prompt.output))
                context += prompt.cached + 1
        elif decoding:
            until_end = max(1.0, -(-(decoding[0][0] - step) // 1))
            mean = context / decodes
            each = step_s(Batch(decodes=decodes, decode_context=mean + until_end * rate / 2))
            steps = until_end
            if arrived < len(due):
                gap = due[arrived] + limits.request_s - now
                steps = max(1.0, min(until_end, -(-gap // each)))
            now += steps * each
            step += steps
            context += steps * decodes * rate
        elif arrived < len(due):
            now = due[arrived] + limits.request_s
            continue
        while decoding and decoding[0][0] <= step + 1e-9:
            _, number, kv_tokens = heapq.heappop(decoding)
            ends[number], served[number] = now, True
            if stop_when and number >= warmup and stop_when(ttft[number], now - due[number], outputs[number]):
                return Outcome()
            reserved -= kv_tokens
            context = max(0.0, context - kv_tokens)
            if closed and len(due) < count:
                due.append(now)
    found = Outcome(rejected=rejected)
    for number in range(warmup, len(due)):
        if served[number]:
            found.due.append(due[number])
            e2e = ends[number] - due[number]
            found.ttft.append(ttft[number])
            found.e2e.append(e2e)
            if outputs[number] > 1:
                found.tpot.append((e2e - ttft[number]) / (outputs[number] - 1))
    found.last_ttft_s = found.ttft[-1] if found.ttft else 0.0
    return found
