"""The expected effect of a change: the plan's estimate before and after it, or bounds that the observation gives.

An estimator returns the factor on the rule's metric with an interval, or None where it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powerband.core.diagnosis import Effect, Observation
from powerband.core.statistics import Interval
from powerband.diagnose import roofline
from powerband.diagnose.roofline import StepModel
from powerband.plan.step_work import Batch

_NO_GAIN_ON_CPU = 0.9  # measured: eight sequences instead of one gave 0.97 times the tokens on two cores
Estimate = tuple[Interval, str] | None
_PLAN = "the plan's step model, scaled to the observed time between tokens"


def effect(
    metric: str,
    estimate: str,
    observation: Observation,
    found: StepModel | None,
    *,
    wanted: Mapping[str, Any],
    published: tuple[float, float] | None,
    note: str,
) -> Effect:
    """Return the effect of setting the `wanted` knobs."""
    result = ESTIMATORS[estimate](observation, found, wanted) if estimate else None
    if result is not None:
        return Effect(metric=metric, factor=_rounded(result[0]), basis=result[1])
    if published is not None:
        low, high = published
        return Effect(
            metric=metric, factor=Interval((low * high) ** 0.5, low, high), basis=note or "published cases elsewhere"
        )
    return Effect(metric=metric, basis=note or "unknown: too little of the server was read to estimate it")


def _rounded(one: Interval) -> Interval:
    low = max(0.0, min(one.low, one.value))
    return Interval(round(one.value, 3), round(low, 3), round(max(one.high, one.value), 3))


def _more_sequences(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """More requests at once: throughput of the waiting requests, from 'no gain' to 'steps cost the same'."""
    limit = wanted.get("max_num_seqs") or wanted.get("parallel") or one.kv_sequences
    if not one.running or one.waiting is None or not limit:
        return None
    demand = min(one.running + one.waiting, float(limit))
    most = max(1.0, demand / one.running)
    lengths = roofline.lengths(one)
    if found is None or lengths is None:
        return Interval(most**0.5, 1.0, most), "bounds: the step takes between the same and proportionally longer"
    before, after = (found.steady(batch, lengths).tpot_s for batch in (one.running, demand))
    gain = max(1.0, min(most, most * before / after))
    if found.server.times.device.vendor == "cpu":  # a CPU is near its arithmetic limit with few sequences
        return Interval(gain**0.5, _NO_GAIN_ON_CPU, gain), f"{_PLAN}, from no gain: a CPU may be compute-bound"
    return Interval(gain, 1 + (gain - 1) / 2, 1 + (most - 1) * 0.5 + (gain - 1) * 0.5), _PLAN


def _more_kv(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """A KV cache without preemptions: no prompt is computed twice, and more requests run."""
    more = _more_sequences(one, found, {"max_num_seqs": one.sequence_limit or 1e9})
    if more is None:
        return None
    interval, basis = more
    recomputed = (one.preempted_share or 0.0) * (one.prefill_share or 0.3)
    return Interval(interval.value * (1 + recomputed / 2), 1.0, interval.high * (1 + recomputed)), basis


def _slots_filled(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Slots that refill at once: from no gain to all slots busy all the time."""
    if not one.running or not one.sequence_limit:
        return None
    return _more_sequences(
        one.model_copy(update={"waiting": max(one.waiting or 0.0, one.sequence_limit - one.running)}),
        found,
        {"max_num_seqs": one.sequence_limit},
    )


def _all_waiting_run(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Requests that wait for something else than the batch run."""
    return _more_sequences(one, found, {"max_num_seqs": one.sequence_limit or 1e9})


def _more_replicas(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Replicas for the waiting requests: up to proportional."""
    if not one.running or not one.waiting:
        return None
    most = 1 + one.waiting / one.running
    return Interval(1 + (most - 1) * 0.8, 1.0, most), "bounds: as many replicas as the waiting requests need"


def _replicas_for_tensor(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Replicas instead of tensor parallelism: the plan at the same number of GPUs."""
    lengths = roofline.lengths(one)
    if found is None or lengths is None or not one.running:
        return None
    replicas = max(1, int(wanted.get("data_parallel_size") or 1))
    before = found.steady(one.running, lengths).tpot_s
    after = found.steady(one.running / replicas, lengths, changes={**wanted, "data_parallel_size": 1}).tpot_s
    gain = before / after
    spread = found.server.times.coefficients.tpot
    return Interval(gain, gain * spread.low, gain * spread.high), _PLAN


def _frontend_removed(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """TTFT without the wait in the API server."""
    if one.frontend_share is None:
        return None
    return Interval(1 - one.frontend_share * 0.75, 1 - one.frontend_share, 1.0), "bounds: the share of the frontend"


def _no_prefill(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Cached prompts: between no gain (nothing is shared) and no prefill at all."""
    if one.prefill_share is None:
        return None
    most = 1 / max(0.01, 1 - one.prefill_share)
    return Interval(
        1 + (most - 1) / 2, 1.0, most
    ), f"bounds: prefill takes {one.prefill_share:.0%} of the time; the gain depends on how much prompts share"


def _without_drafts(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """No speculation: a step yields one token, and does not verify drafts."""
    if not one.tokens_per_step or not one.drafted_per_step:
        return None
    verified = 1 + one.drafted_per_step
    lengths = roofline.lengths(one)
    if found is None or lengths is None or not one.running:
        cost = verified**0.5
        return Interval(cost / one.tokens_per_step, 1 / one.tokens_per_step, verified / one.tokens_per_step), (
            "bounds: verifying drafts costs between nothing and as much as generating them"
        )
    steps = found.server.times
    batch = Batch(decodes=max(1.0, one.running), decode_context=lengths.prompt + lengths.output / 2)
    cost = steps(batch._replace(tokens_per_decode=verified)) / steps(batch)
    gain = cost / one.tokens_per_step
    return Interval(gain, min(gain, 1 / one.tokens_per_step), verified / one.tokens_per_step), _PLAN


def _more_cores(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """More compute threads: between no gain (bandwidth-bound) and proportional."""
    if not one.bound_cores or not one.physical_cores:
        return None
    most = one.physical_cores / min(one.bound_cores, one.compute_threads or one.bound_cores)
    if most <= 1:
        return None
    return Interval(1 + (most - 1) * 0.7, 1.0, most), "bounds: decoding gains less than cores, prefill as much"


def _fewer_threads(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """No more threads than cores: threads wait for each other at every barrier."""
    cores = min(one.cpu_quota or 1e9, one.bound_cores or one.physical_cores or 1e9)
    threads = one.compute_threads or one.settings.get("threads")
    if not isinstance(threads, (int, float)) or cores >= threads:
        return None
    most = 1 + 2 * (threads / cores - 1)
    return Interval(most**0.5, 1.0, max(most, 3.0)), "bounds: threads that share a core wait for each other"


def _larger_chunk(one: Observation, found: StepModel | None, wanted: Mapping[str, Any]) -> Estimate:
    """Larger prefill steps: fewer steps for each prompt, so less fixed cost and fewer passes over the weights."""
    lengths = roofline.lengths(one)
    present = one.settings.get("max_num_batched_tokens") or one.settings.get("ubatch_size")
    if found is None or lengths is None or not isinstance(present, int) or not one.prefill_share:
        return None
    times = found.server.times
    prompt = max(1.0, lengths.prompt * (1 - lengths.cached_share))

    def prefill_s(chunk: float) -> float:
        size = min(chunk, prompt)
        return prompt / size * times(Batch(prefill_tokens=size, prefill_context=prompt / 2))

    chunk = next((value for value in wanted.values() if isinstance(value, int)), 2 * present)
    gain = prefill_s(present) / prefill_s(chunk)
    whole = 1 / (1 - one.prefill_share + one.prefill_share / max(1.0, gain))
    return Interval(whole, 1.0, 1 / max(0.01, 1 - one.prefill_share)), _PLAN


ESTIMATORS: Mapping[str, Callable[[Observation, StepModel | None, Mapping[str, Any]], Estimate]] = {
    "more_sequences": _more_sequences,
    "more_kv": _more_kv,
    "slots_filled": _slots_filled,
    "all_waiting_run": _all_waiting_run,
    "more_replicas": _more_replicas,
    "replicas_for_tensor": _replicas_for_tensor,
    "frontend_removed": _frontend_removed,
    "no_prefill": _no_prefill,
    "without_drafts": _without_drafts,
    "more_cores": _more_cores,
    "fewer_threads": _fewer_threads,
    "larger_chunk": _larger_chunk,
}
