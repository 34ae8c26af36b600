"""Decide whether a level meets the SLO before its window ends, with a stated error.

A decision predicts the verdict of the whole window: given the late answers so far, how many will be late at its end?
The late answers of the rest follow a beta-binomial distribution. Answers near a bound are weak evidence, and
consecutive answers are not independent: a level that meets the SLO is judged by a tighter bound, one that misses it by
a wider bound, and every answer counts as half an observation. The proof `quick-decisions` measures the error.
"""

from __future__ import annotations

import math
from functools import lru_cache

ERROR = 0.1  # probability that a decision differs from the verdict of the whole window, at most
MARGIN = 1.25  # factor between an SLO bound and the bound that a decision uses
_MIN_ANSWERS = 12
_CERTAINTY = 0.97  # of one look; there is a look after every answer
_DESIGN_EFFECT = 2.0


@lru_cache(maxsize=4096)  # there is a look after every answer, and at every tick of the progress
def probability_met(late: int, answers: int, requests: int, share: float) -> float:
    """Return the probability that at most a `share` of all requests is late, given the late answers so far."""
    allowed, rest = math.floor(share * requests + 1e-9) - late, requests - answers
    if allowed < 0:
        return 0.0
    if allowed >= rest:
        return 1.0
    a, b = late / _DESIGN_EFFECT + 0.5, (answers - late) / _DESIGN_EFFECT + 0.5
    fixed = math.lgamma(rest + 1) - math.lgamma(a + b + rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    terms = (
        math.exp(
            fixed + math.lgamma(a + count) + math.lgamma(b + rest - count)
            - math.lgamma(count + 1) - math.lgamma(rest - count + 1)
        )
        for count in range(allowed + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(terms))


def meets(late_by_tight_bound: int, answers: int, requests: int, share: float) -> bool:
    """Return whether a bound will be met, given the answers beyond the tighter bound."""
    return answers >= _MIN_ANSWERS and probability_met(late_by_tight_bound, answers, requests, share) >= _CERTAINTY


def misses(late_by_wide_bound: int, answers: int, requests: int, share: float) -> bool:
    """Return whether a bound will be missed, given the answers beyond the wider bound."""
    return answers >= _MIN_ANSWERS and probability_met(late_by_wide_bound, answers, requests, share) <= 1 - _CERTAINTY
