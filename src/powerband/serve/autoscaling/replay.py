"""Replay a trace: what the autoscaler would have cost, beside the alternatives chosen with hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from powerband.core.scaling import ScalingRow, ScalingSpan
from powerband.serve.autoscaling import simulation
from powerband.serve.autoscaling.autoscaler import Autoscaler
from powerband.serve.autoscaling.bounds import Hindsight
from powerband.serve.autoscaling.policy import ScalingPolicy
from powerband.serve.autoscaling.replica_model import Arrival, ReplicaSpeed
from powerband.serve.autoscaling.simulation import SimulationResult

_MAX_TICKS = 20_000  # of a replay; a longer trace is scaled less often
_MAX_SLOTS = 2000


@dataclass(frozen=True)
class Replay:
    """A trace under the autoscaler, and under the alternatives at the same attainment."""

    requests: int
    span_s: float
    policy: ScalingPolicy
    rows: tuple[ScalingRow, ...]  # the first is the autoscaler
    spans: tuple[ScalingSpan, ...]
    last_reason: str


def replay(
    trace: Sequence[Arrival],
    speed: ReplicaSpeed,
    policy: ScalingPolicy,
    *,
    max_replicas: int | None = None,
    spans: int = 240,
) -> Replay:
    """Replay a trace; the fleet begins with, and never exceeds, `max_replicas`. None: what its peak needs."""
    span_s = trace[-1].at_s
    interval_s = max(1.0, span_s / _MAX_TICKS)
    hindsight = Hindsight(trace, speed, slot_s=max(15.0, span_s / _MAX_SLOTS), interval_s=interval_s)
    peak = hindsight.peak_sized()
    most = max(policy.min_replicas, max_replicas or peak.result.max_replicas)
    policy = replace(policy, max_replicas=most)
    scaler = Autoscaler(policy)
    ours = simulation.simulate(
        trace,
        speed,
        scaler.desired_replicas,
        initial_replicas=most,
        start_s=policy.start_s,
        interval_s=interval_s,
    )
    start_s = policy.start_s
    fixed = hindsight.best_fixed(ours.attainment)
    rule = hindsight.best_threshold(ours.attainment, initial=most, start_s=start_s, most=most)
    known = hindsight.clairvoyant(ours.attainment, initial=most, start_s=start_s)
    rows = [_row("autoscaler", ours), _row(f"best fixed ({fixed.name})", fixed.result)]
    rows += [_row(f"sized for the peak ({peak.name})", peak.result)]
    rows += [_row(f"best threshold ({rule.name})", rule.result)] if rule else []
    rows += [_row("clairvoyant, same start time", known.result)] if known else []
    reason = scaler.decision.reason if scaler.decision else ""
    return Replay(len(trace), span_s, policy, tuple(rows), _spans(trace, ours, span_s / spans), reason)


def _row(name: str, result: SimulationResult) -> ScalingRow:
    late = result.requests - result.attained
    return ScalingRow(name, result.replica_s / 3600, result.attainment, late, result.starts)


def _spans(trace: Sequence[Arrival], result: SimulationResult, length_s: float) -> tuple[ScalingSpan, ...]:
    count = max(1, round(trace[-1].at_s / length_s))
    arrived, late, paid_s = [0] * count, [0] * count, [0.0] * count

    def place(at_s: float) -> int:
        return min(count - 1, int(at_s / length_s))

    for request, missed in zip(trace, result.late, strict=True):
        arrived[place(request.at_s)] += 1
        late[place(request.at_s)] += missed
    for one, following in pairwise(result.timeline):
        for index in range(place(one.at_s), place(following.at_s) + 1):
            overlap_s = min(following.at_s, (index + 1) * length_s) - max(one.at_s, index * length_s)
            paid_s[index] += (one.ready + one.starting) * max(0.0, overlap_s)
    found, total_s = [], 0.0
    for index in range(count):
        total_s += paid_s[index]
        begin_s = index * length_s
        found.append(
            ScalingSpan(begin_s, arrived[index] / length_s, paid_s[index] / length_s, late[index], total_s / 3600)
        )
    return tuple(found)
