"""From figures to a verdict: fidelity may reject; only tasks, or a fidelity that leaves nothing to differ, may pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from powerband.core.evaluation import Figure
from powerband.core.quality import Bound, Judgement, QualityFloor
from powerband.core.statistics import Interval

# So near the reference that no task could tell: what the reference itself shows after a restart is nearer still.
_CLOSE = {"kl_mean": 0.004, "top1_agreement": 0.97}


def figure(name: str, kind: str, found: Interval, samples: int, bound: Bound | None) -> Figure:
    """Return a figure, judged where a bound is given."""
    judgement = bound.judge(found) if bound else None
    wanted = bound.samples_to_decide(found, samples) if bound and judgement == "undecided" else None
    return Figure(
        name=name,
        kind=kind,
        found=found,
        samples=samples,
        bound=str(bound) if bound else "",
        judgement=judgement,
        samples_to_decide=wanted,
    )


def verdict(floor: QualityFloor, figures: Sequence[Figure]) -> tuple[Judgement, str]:
    """Return the verdict and its reason in words."""
    judged = {one.name: one for one in figures if one.judgement}
    failed = [one for one in judged.values() if one.judgement == "fail"]
    if failed:
        return "fail", "; ".join(_told(one) for one in failed)
    unseen = [name for name in floor.fidelity if name not in judged]
    if unseen:
        return "undecided", f"{', '.join(unseen)} could not be asked; give the deployment more context"
    missing = [name for name in floor.tasks if f"{name} recovery" not in judged]
    open_ones = [one for one in judged.values() if one.judgement == "undecided"]
    if not missing and floor.tasks and not open_ones:
        kept = [_told(judged[f"{name} recovery"]) for name in floor.tasks]
        return "pass", "; ".join(kept) + f"; and {len(judged) - len(kept)} bounds of fidelity hold"
    close = _closeness(figures)
    if close and not open_ones:
        return "pass", close
    if open_ones:
        one = max(open_ones, key=lambda figure: figure.samples_to_decide or 10**9)
        more = "no number of samples would decide: it sits on the bound, or the reference scores too little"
        if one.samples_to_decide:
            more = f"about {one.samples_to_decide} samples would decide"
        return "undecided", f"{_told(one)}; {more}"
    what = ", ".join(missing) if missing else "a task"
    return "undecided", f"fidelity alone does not pass a deployment that differs this much; {what} must be scored"


def _closeness(figures: Sequence[Figure]) -> str:
    whole: Mapping[str, Figure] = {one.name: one for one in figures if not one.kind}
    divergence, agreement = whole.get("kl_mean"), whole.get("top1_agreement")
    if divergence is None or agreement is None:
        return ""
    if divergence.found.high > _CLOSE["kl_mean"] or agreement.found.low < _CLOSE["top1_agreement"]:
        return ""
    return f"so close to the reference that no task could tell: {_told(divergence)}, {_told(agreement)}"


def _told(one: Figure) -> str:
    found = one.found
    bound = f", wanted {one.bound}" if one.bound else ""
    return f"{one.name} is {found.value:.4g} [{found.low:.4g}, {found.high:.4g}]{bound}"
