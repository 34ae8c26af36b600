"""Fidelity: how far a deployment's next-token distributions are from the reference's, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from powerband.core.scoring import TokenDistribution
from powerband.core.statistics import UNBOUNDED, Interval, student_t, wilson, z_of

_CLEAR_MARGIN = math.log(2)  # the reference prefers a token clearly if it is more than twice as likely


@dataclass(frozen=True)
class TextComparison:
    """The candidate compared with the reference on one text; the figures are sums over its scored positions."""

    kind: str  # the class of text
    positions: int
    kl: float
    same_top: int  # positions where both have the same most likely token
    logprob_loss: float  # log-likelihood of the actual tokens: the reference's minus the candidate's


def kl(reference: TokenDistribution, candidate: TokenDistribution) -> float:
    """Return the KL divergence over the tokens that both list, and one bucket for all other tokens.

    Merging tokens cannot raise a KL divergence, so this is a lower bound of the divergence over the full vocabulary.
    """
    ours, theirs = dict(reference.top), dict(candidate.top)
    shared = [token for token in ours if token in theirs]
    total, p_rest, q_rest = 0.0, 1.0, 1.0
    for token in shared:
        p, q = math.exp(ours[token]), math.exp(theirs[token])
        total += p * (ours[token] - theirs[token])
        p_rest, q_rest = p_rest - p, q_rest - q
    p_rest, q_rest = max(p_rest, 1e-9), max(q_rest, 1e-9)
    return max(0.0, total + p_rest * math.log(p_rest / q_rest))


def compare(
    kind: str, reference: Sequence[TokenDistribution], candidate: Sequence[TokenDistribution]
) -> TextComparison:
    """Compare the two deployments' distributions at the scored positions of one text."""
    pairs = list(zip(reference, candidate, strict=True))
    return TextComparison(
        kind=kind,
        positions=len(pairs),
        kl=math.fsum(kl(ours, theirs) for ours, theirs in pairs),
        same_top=sum(ours.best == theirs.best for ours, theirs in pairs),
        logprob_loss=math.fsum(ours.logprob - theirs.logprob for ours, theirs in pairs),
    )


def diverged(reference: Sequence[int], distributions: Sequence[TokenDistribution], candidate: Sequence[int]) -> bool:
    """Return whether a greedy answer diverges from the reference's where the reference clearly prefers its own token.

    Where two tokens are about equally likely, rounding can make even the reference diverge from itself: not counted.
    """
    for ours, distribution, theirs in zip(reference, distributions, candidate, strict=False):
        if ours != theirs:
            logprob = dict(distribution.top).get(theirs)
            return logprob is None or distribution.logprob - logprob > _CLEAR_MARGIN
    return False


FIGURES = ("kl_mean", "top1_agreement", "perplexity_ratio")


def interval(texts: Sequence[TextComparison], figure: str, *, level: float = 0.95) -> Interval:
    """Return a figure with its confidence interval. Texts are the sampling unit: positions in a text are correlated."""
    values = {
        "kl_mean": [one.kl for one in texts],
        "top1_agreement": [float(one.same_top) for one in texts],
        "perplexity_ratio": [one.logprob_loss for one in texts],
    }[figure]
    positions = sum(one.positions for one in texts)
    mean = math.fsum(values) / positions
    if len(texts) < 2:
        return Interval(math.exp(mean) if figure == "perplexity_ratio" else mean, -UNBOUNDED, UNBOUNDED)
    squares = math.fsum((value - mean * one.positions) ** 2 for value, one in zip(values, texts, strict=True))
    error = math.sqrt(squares * len(texts) / (len(texts) - 1)) / positions  # standard error of the mean
    t = student_t(len(texts) - 1, z_of(level))
    if figure == "perplexity_ratio":
        return Interval(math.exp(mean), math.exp(mean - t * error), math.exp(mean + t * error))
    if figure == "kl_mean":  # not negative and right-skewed, so the interval is symmetric in the logarithm
        factor = math.exp(t * error / mean) if mean else 1.0
        return Interval(mean, mean / factor, mean * factor)
    design_effect = error**2 / (mean * (1 - mean) / positions) if 0 < mean < 1 else 1.0
    independent = positions / max(1.0, design_effect)  # effective sample size
    return wilson(mean * independent, independent, z=t)
