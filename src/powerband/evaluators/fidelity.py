"""How far a deployment's next-token distributions are from the reference's, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from powerband.core.scoring import TokenDistribution
from powerband.core.statistics import UNBOUND, Interval, student, wilson, z_of

_CLEAR = math.log(2)  # a token that the reference finds half as likely as its own choice is a clear choice missed


@dataclass(frozen=True)
class Compared:
    """One text: what its places showed."""

    kind: str  # the class of text
    places: int
    kl: float  # sums over the places
    same: int
    lost: float  # log-likelihood of the actual tokens, the reference's less the candidate's


def kl(reference: TokenDistribution, candidate: TokenDistribution) -> float:
    """Return the divergence over the tokens that both name and one bucket for the rest.

    Merging what is not named cannot raise a divergence, so this is a lower bound of the whole one.
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


def compare(kind: str, reference: Sequence[TokenDistribution], candidate: Sequence[TokenDistribution]) -> Compared:
    """Put two scorings of one text side by side."""
    pairs = list(zip(reference, candidate, strict=True))
    return Compared(
        kind=kind,
        places=len(pairs),
        kl=math.fsum(kl(ours, theirs) for ours, theirs in pairs),
        same=sum(ours.best == theirs.best for ours, theirs in pairs),
        lost=math.fsum(ours.logprob - theirs.logprob for ours, theirs in pairs),
    )


def diverged(answer: Sequence[int], places: Sequence[TokenDistribution], other: Sequence[int]) -> bool:
    """Tell whether another greedy answer leaves the reference's way at a place where it saw a clear choice.

    Rounding makes even the reference leave its own way where two tokens are about as likely; that spoils nothing.
    """
    for token, place, theirs in zip(answer, places, other, strict=False):
        if token != theirs:
            likelihood = dict(place.top).get(theirs)
            return likelihood is None or place.logprob - likelihood > _CLEAR
    return False


FIGURES = ("kl_mean", "top1_agreement", "perplexity_ratio")


def interval(texts: Sequence[Compared], figure: str, *, level: float = 0.95) -> Interval:
    """Return a figure with its interval; texts are what is drawn, for the places of one text are alike."""
    values = {
        "kl_mean": [one.kl for one in texts],
        "top1_agreement": [float(one.same) for one in texts],
        "perplexity_ratio": [one.lost for one in texts],
    }[figure]
    places = sum(one.places for one in texts)
    mean = math.fsum(values) / places
    if len(texts) < 2:
        return Interval(math.exp(mean) if figure == "perplexity_ratio" else mean, -UNBOUND, UNBOUND)
    off = math.fsum((value - mean * one.places) ** 2 for value, one in zip(values, texts, strict=True))
    spread = math.sqrt(off * len(texts) / (len(texts) - 1)) / places
    t = student(len(texts) - 1, z_of(level))
    if figure == "perplexity_ratio":
        return Interval(math.exp(mean), math.exp(mean - t * spread), math.exp(mean + t * spread))
    if figure == "kl_mean":  # never below nothing, and with a long tail: even in its logarithm
        factor = math.exp(t * spread / mean) if mean else 1.0
        return Interval(mean, mean / factor, mean * factor)
    alike = spread**2 / (mean * (1 - mean) / places) if 0 < mean < 1 else 1.0
    worth = places / max(1.0, alike)  # independent places
    return wilson(mean * worth, worth, z=t)
