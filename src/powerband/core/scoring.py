"""What an engine is asked about tokens, and what it answers; the same words for every engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar


class EngineRequest(NamedTuple):
    """One question to a server."""

    path: str
    body: dict[str, Any]


class TokenDistribution(NamedTuple):
    """What an engine thinks of one place in a text."""

    logprob: float  # of the token that really stands there
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probabilities, best first

    @property
    def best(self) -> int:
        """Return the likeliest token."""
        return self.top[0][0]


class Answer(NamedTuple):
    """What an engine wrote, greedily."""

    tokens: tuple[int, ...]
    places: tuple[TokenDistribution, ...]
    text: str


T = TypeVar("T")
Exchange = Generator[EngineRequest, dict[str, Any], T]  # yields questions, is sent the answers, returns what they mean
