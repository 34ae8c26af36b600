"""Engine-independent types for tokenizing, scoring and generating through an engine's HTTP API."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar


class EngineRequest(NamedTuple):
    """One HTTP POST to an engine."""

    path: str
    body: dict[str, Any]


class TokenDistribution(NamedTuple):
    """An engine's next-token distribution at one position of a text."""

    logprob: float  # of the actual token at the position
    top: tuple[tuple[int, float], ...]  # the most likely tokens and their log-probabilities, most likely first

    @property
    def best(self) -> int:
        """Return the most likely token."""
        return self.top[0][0]


class Answer(NamedTuple):
    """A greedy answer."""

    tokens: tuple[int, ...]
    distributions: tuple[TokenDistribution, ...]  # one for each token
    text: str


T = TypeVar("T")
# One or more requests to an engine. The engine's adapter yields each request, receives its JSON response, and returns
# the result; a client does the I/O.
Exchange = Generator[EngineRequest, dict[str, Any], T]
