"""How far a deployment's next-token distributions are from the reference's, on the same tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from powerband.core.scoring import Spot
from powerband.core.statistics import Interval, quantile

_DRAWS = 1000
_CLEAR = math.log(2)  # a token that the reference finds half as likely as its own choice is a clear choice missed


@dataclass(frozen=True)
class Compared:
    """One text: what its places showed."""

    kind: str  # the class of text
    places: int
    kl: float  # sums over the places
    same: int
    lost: float  # log-likelihood of the actual tokens, the reference's less the candidate's


def kl(reference: Spot, candidate: Spot) -> float:
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


def compare(kind: str, reference: Sequence[Spot], candidate: Sequence[Spot]) -> Compared:
    """Put two scorings of one text side by side."""
    pairs = list(zip(reference, candidate, strict=True))
    return Compared(
        kind=kind,
        places=len(pairs),
        kl=math.fsum(kl(ours, theirs) for ours, theirs in pairs),
        same=sum(ours.best == theirs.best for ours, theirs in pairs),
        lost=math.fsum(ours.logprob - theirs.logprob for ours, theirs in pairs),
    )


def spoiled(answer: Sequence[int], places: Sequence[Spot], other: Sequence[int]) -> bool:
    """Tell whether another greedy answer leaves the reference's way at a place where it saw a clear choice.

    Rounding makes even the reference leave its own way where two tokens are about as likely; that spoils nothing.
    """
    for token, place, theirs in zip(answer, places, other, strict=False):
        if token != theirs:
            likelihood = dict(place.top).get(theirs)
            return likelihood is None or place.logprob - likelihood > _CLEAR
    return False


Figure = Callable[[Sequence[Compared]], float]


def _per_place(what: Callable[[Compared], float]) -> Figure:
    def figure(texts: Sequence[Compared]) -> float:
        return math.fsum(map(what, texts)) / max(1, sum(one.places for one in texts))

    return figure


FIGURES: Mapping[str, Figure] = {
    "kl_mean": _per_place(lambda one: one.kl),
    "top1_agreement": _per_place(lambda one: one.same),
    "perplexity_ratio": lambda texts: math.exp(_per_place(lambda one: one.lost)(texts)),
}


def interval(texts: Sequence[Compared], figure: Figure, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Return a figure with its interval: whole texts are drawn again, for places of one text are alike."""
    rng, value = random.Random(seed), figure(texts)
    if len(texts) < 2:
        return Interval(value, -math.inf, math.inf)
    draws = sorted(figure(rng.choices(texts, k=len(texts))) for _ in range(_DRAWS))
    tail = (1 - level) / 2
    return Interval(value, min(value, quantile(draws, tail)), max(value, quantile(draws, 1 - tail)))
