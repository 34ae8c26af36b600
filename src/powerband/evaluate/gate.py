"""The quality gate: figures and their bounds give a verdict.

A fidelity figure alone can fail a deployment. To pass, a deployment needs task scores too, unless its fidelity shows
that it is indistinguishable from the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from powerband.core.evaluation import Figure
from powerband.core.quality import AT_TRAFFIC_LENGTH, Bound, Judgement, QualityFloor
from powerband.core.statistics import Interval

# Within these limits no task shows a difference. The reference against itself after a restart is well within them.
_INDISTINGUISHABLE = {"kl_mean": 0.004, "top1_agreement": 0.97}


def figure(name: str, kind: str, found: Interval, samples: int, bound: Bound | None) -> Figure:
    """Return a figure, with its judgement if it has a bound."""
    judgement = bound.judge(found) if bound else None
    if bound and name in AT_TRAFFIC_LENGTH and judgement == "undecided":  # few samples: only a clear fault counts
        judgement = "pass"
    needed = bound.samples_to_decide(found, samples) if bound and judgement == "undecided" else None
    return Figure(
        name=name,
        kind=kind,
        found=found,
        samples=samples,
        bound=str(bound) if bound else "",
        judgement=judgement,
        samples_to_decide=needed,
    )


def verdict(floor: QualityFloor, figures: Sequence[Figure]) -> tuple[Judgement, str]:
    """Return the verdict and its reason."""
    judged = {one.name: one for one in figures if one.judgement}
    failed = [one for one in judged.values() if one.judgement == "fail"]
    if failed:
        return "fail", "; ".join(_describe(one) for one in failed)
    unmeasured = [name for name in floor.fidelity if name not in judged and name not in AT_TRAFFIC_LENGTH]
    if unmeasured:
        names = ", ".join(unmeasured)
        return "undecided", f"{names} could not be measured; increase the deployment's context length"
    missing = [name for name in floor.tasks if f"{name} recovery" not in judged]
    undecided = [one for one in judged.values() if one.judgement == "undecided"]
    if not missing and floor.tasks and not undecided:
        recoveries = [_describe(judged[f"{name} recovery"]) for name in floor.tasks]
        return "pass", "; ".join(recoveries) + f"; all {len(judged) - len(recoveries)} fidelity bounds are met"
    indistinguishable = _indistinguishable(figures)
    if indistinguishable and not undecided:
        return "pass", indistinguishable
    if undecided:
        one = max(undecided, key=lambda figure: figure.samples_to_decide or 10**9)
        more = "more samples cannot decide: the value is on the bound, or the reference's score is too low"
        if one.samples_to_decide:
            more = f"about {one.samples_to_decide} samples are needed to decide"
        return "undecided", f"{_describe(one)}; {more}"
    tasks = ", ".join(missing) if missing else "a task"
    return "undecided", f"a deployment that differs this much cannot pass by fidelity alone; {tasks} must be scored"


def _indistinguishable(figures: Sequence[Figure]) -> str:
    """Return why no task is needed, or nothing if the fidelity figures leave room for a difference."""
    overall: Mapping[str, Figure] = {one.name: one for one in figures if not one.kind}
    divergence, agreement = overall.get("kl_mean"), overall.get("top1_agreement")
    if divergence is None or agreement is None:
        return ""
    limits = _INDISTINGUISHABLE
    if divergence.found.high > limits["kl_mean"] or agreement.found.low < limits["top1_agreement"]:
        return ""
    return f"indistinguishable from the reference: {_describe(divergence)}, {_describe(agreement)}"


def _describe(one: Figure) -> str:
    found = one.found
    bound = f" (floor: {one.bound})" if one.bound else ""
    return f"{one.name} is {found.value:.4g} [{found.low:.4g}, {found.high:.4g}]{bound}"
