"""A closed loop at fixed concurrency with equal requests: mean latencies, without a simulation."""

from __future__ import annotations

from typing import NamedTuple

from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Work


class SteadyState(NamedTuple):
    """The steady state of a closed loop: the work and time of its two kinds of steps, and the mean latencies."""

    concurrency: float  # of one data-parallel group
    prompt: float
    output: float
    decode: Work  # one decode step of all sequences
    prefill: Work  # of one prompt
    decode_s: float
    prefill_s: float
    tpot_s: float
    ttft_s: float


def steady_state(
    times: StepTimes, *, concurrency: float, prompt: float, output: float, cached: float = 0.0
) -> SteadyState:
    """Return the steady state; `cached` tokens of each prompt are already in the KV cache.

    A decoding sequence waits for the prefill of other requests, and a prompt waits for the prompts queued before it.
    """
    c, uncached = times.coefficients, prompt - cached
    decode = Batch(decodes=concurrency, decode_context=prompt + output / 2)
    prefill = Batch(prefill_tokens=uncached, prefill_context=cached + uncached / 2, finished_prompts=1)
    decode_s, prefill_s = times(decode), times(prefill)
    in_group = concurrency / times.steps.split.data
    tokens_per_step = times.speculation.tokens_per_step
    return SteadyState(
        concurrency=in_group,
        prompt=prompt,
        output=output,
        decode=times.steps(decode),
        prefill=times.steps(prefill),
        decode_s=decode_s,
        prefill_s=prefill_s,
        tpot_s=decode_s / tokens_per_step + in_group * prefill_s / output * c.prefill_interference,
        ttft_s=c.request_s
        + prefill_s * (1 + c.queue_factor * in_group**c.queue_exponent)
        + decode_s * c.steps_before_prefill,
    )
