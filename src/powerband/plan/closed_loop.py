"""So many users who never pause, with equal requests: what each of them gets on average."""

from __future__ import annotations

from typing import NamedTuple

from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Work


class SteadyState(NamedTuple):
    """A closed loop as the roofline sees it: its two kinds of steps, and what comes of them."""

    users: float
    prompt: float
    output: float
    writing: Work  # a step that writes one token of every answer
    reading: Work  # of one prompt
    writing_s: float
    reading_s: float
    tpot_s: float
    ttft_s: float


def steady_state(times: StepTimes, *, users: float, prompt: float, output: float, known: float = 0.0) -> SteadyState:
    """Return what users get: a token waits for others' prompts, a prompt for those before it."""
    c, fresh = times.coefficients, prompt - known
    batches = (
        Batch(decodes=users, context=prompt + output / 2),
        Batch(prefill=fresh, behind=known + fresh / 2, firsts=1),
    )
    writing_s, reading_s = times(batches[0]), times(batches[1])
    own = users / times.steps.split.data  # of those who share a device
    return SteadyState(
        users=own,
        prompt=prompt,
        output=output,
        writing=times.steps(batches[0]),
        reading=times.steps(batches[1]),
        writing_s=writing_s,
        reading_s=reading_s,
        tpot_s=writing_s / times.drafting.per_step + own * reading_s / output * c.mixing,
        ttft_s=c.request_s + reading_s * (1 + c.queue * own**c.queue_power) + writing_s * c.under_way,
    )
