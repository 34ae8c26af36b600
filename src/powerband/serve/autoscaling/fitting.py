"""Fit the simulator's replica to what a recipe promises of one: its rate within the SLO and its concurrency."""

from __future__ import annotations

import random
from collections.abc import Sequence

from powerband.serve.autoscaling import simulation
from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed

_OUTPUT_TOKEN_WORK = 4.0  # of a prompt token, as the picker counts work
_FIXED_SHARE = 0.7  # of a decode step of a full batch: reading the weights
_REQUESTS, _STEPS, _SEED = 1500, 8, 3


def rate_within_slo(like: Sequence[Arrival], speed: ReplicaSpeed, *, attainment: float) -> float:
    """Return the highest Poisson rate that one replica serves with this attainment, for the lengths of a trace."""
    low, high = 0.0, speed.saturated_rate_per_s(like)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _sustains(like, speed, middle, attainment) else (low, middle)
    return low


def fitted_speed(
    like: Sequence[Arrival],
    *,
    rate_per_s: float,
    slots: int,
    attainment: float,
    ttft_s: float,
    queue_timeout_s: float,
) -> ReplicaSpeed:
    """Return the slowest replica that serves `rate_per_s` of such requests with this attainment.

    Its shape is assumed (an output token of a full batch costs four prompt tokens; most of a decode step does not
    depend on the batch); its speed is fitted by simulation.
    """

    def speed(prompt_token_s: float) -> ReplicaSpeed:
        full_step_s = _OUTPUT_TOKEN_WORK * prompt_token_s * slots
        sequence_s = (1 - _FIXED_SHARE) * full_step_s / slots
        return ReplicaSpeed(
            slots,
            step_s=_FIXED_SHARE * full_step_s,
            prompt_token_s=prompt_token_s,
            sequence_s=sequence_s,
            ttft_s=ttft_s,
            queue_timeout_s=queue_timeout_s,
        )

    tokens = sum(one.prompt_tokens + _OUTPUT_TOKEN_WORK * one.output_tokens for one in like) / len(like)
    low, high = 0.0, 1 / (rate_per_s * tokens)  # at the upper end all slots are always busy
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _sustains(like, speed(middle), rate_per_s, attainment) else (low, middle)
    return speed(low or high / 2)


def _sustains(like: Sequence[Arrival], speed: ReplicaSpeed, rate_per_s: float, attainment: float) -> bool:
    rng, now_s, requests = random.Random(_SEED), 0.0, list[Arrival]()
    while len(requests) < _REQUESTS:
        now_s += rng.expovariate(rate_per_s)
        lengths = rng.choice(like)
        requests.append(Arrival(now_s, lengths.prompt_tokens, lengths.output_tokens))
    one = simulation.simulate(requests, speed, simulation.fixed(1), initial_replicas=1, start_s=0.0, interval_s=60.0)
    return one.rejected <= (1 - attainment) * len(requests)
