"""Model of one replica: continuous batching with chunked prefill, without waiting or a clock.

Between two events (a dispatched request, a prefilled prompt, a finished answer) the batch does not change, so the steps
in between are computed at once, as `plan` does for one engine.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ReplicaSpeed:
    """Coefficients of a replica's steps, and the limits of its scheduler and of the SLO."""

    slots: int  # concurrent requests
    step_s: float  # of a step, whatever its batch
    prompt_token_s: float  # added by each prompt token
    sequence_s: float  # added by each decoding sequence
    batched_tokens: int = 2048  # prompt tokens of one step
    ttft_s: float = 3.0  # limit of the SLO
    queue_timeout_s: float = 1.5  # a request that waits longer for a slot is rejected

    def prefill_s(self, prompt_tokens: int, *, decoding: int) -> float:
        """Return how long a prompt takes beside a number of decoding sequences."""
        steps = math.ceil(prompt_tokens / self.batched_tokens)
        return prompt_tokens * self.prompt_token_s + steps * (self.step_s + decoding * self.sequence_s)

    def saturated_rate_per_s(self, trace: Sequence[Arrival]) -> float:
        """Return the request rate at which all slots of one replica are busy, with the mean lengths of a trace."""
        prompt = sum(one.prompt_tokens for one in trace) / len(trace)
        output = sum(one.output_tokens for one in trace) / len(trace)
        steps = prompt / self.batched_tokens
        alone_s = prompt * self.prompt_token_s + steps * self.step_s  # of the whole replica, for each request
        decode_s = max(0.0, output - self.slots * steps) * (self.step_s + self.slots * self.sequence_s)
        return self.slots / (self.slots * alone_s + decode_s)


class SimulatedReplica:
    """The requests in one replica. `next_s` is the time of its next event; call `advance` then."""

    __slots__ = (
        "_decoding",
        "_prefilling",
        "_since_s",
        "_speed",
        "_step",
        "_step_s",
        "began_s",
        "next_s",
        "running",
        "state",
    )

    def __init__(self, speed: ReplicaSpeed, *, began_s: float, state: str) -> None:
        self._speed, self.began_s, self.state = speed, began_s, state
        self.next_s, self.running = math.inf, 0
        self._since_s, self._step, self._step_s = 0.0, 0.0, speed.step_s  # of the decode steps in progress
        self._decoding: list[tuple[float, int]] = []  # heap: last step, request
        self._prefilling: deque[tuple[int, int, int]] = deque()  # request, prompt tokens, output tokens

    def requests(self) -> list[int]:
        """Return the numbers of its requests, those before their first token first."""
        return [one for one, _, _ in self._prefilling] + [one for _, one in self._decoding]

    def dispatch(self, now_s: float, number: int, request: Arrival) -> None:
        """Add a request."""
        self.running += 1
        self._prefilling.append((number, request.prompt_tokens, request.output_tokens))
        if len(self._prefilling) == 1:
            if self._decoding:  # the decode steps end here; part of a step counts as such
                self._step += (now_s - self._since_s) / self._step_s
            self._begin_prefill(now_s)

    def advance(self, now_s: float) -> tuple[int | None, list[int]]:
        """Process the event at `next_s`; return the request that has its first token, and the finished ones."""
        speed, first = self._speed, None
        if self._prefilling:
            first, prompt_tokens, output_tokens = self._prefilling.popleft()
            self._step += math.ceil(prompt_tokens / speed.batched_tokens)
            heapq.heappush(self._decoding, (self._step + max(0, output_tokens - 1), first))
        else:
            self._step = self._decoding[0][0]
        finished = []
        while self._decoding and self._decoding[0][0] <= self._step + 1e-9:
            finished.append(heapq.heappop(self._decoding)[1])
        self.running -= len(finished)
        if self._prefilling:
            self._begin_prefill(now_s)
        elif self._decoding:
            self._since_s, self._step_s = now_s, speed.step_s + len(self._decoding) * speed.sequence_s
            self.next_s = now_s + (self._decoding[0][0] - self._step) * self._step_s
        else:
            self.next_s, self._step = math.inf, 0.0
        return first, finished

    def _begin_prefill(self, now_s: float) -> None:
        self.next_s = now_s + self._speed.prefill_s(self._prefilling[0][1], decoding=len(self._decoding))
