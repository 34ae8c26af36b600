"""Probes: the texts that both deployments score, and the chats that both answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, TypeVar

from powerband import catalog
from powerband.core.scoring import Answer, TokenDistribution

T = TypeVar("T")
_SCORED_POSITIONS = 16  # of each text
_SKIPPED_TOKENS = 16  # at the start of a text, where too little context makes the next token arbitrary
MAX_TEXT_TOKENS = 320
MAX_ANSWER_TOKENS = 32
SAMPLES_PER_CLASS = 24
_LONG_CHARACTERS = 2200
MIN_CONTEXT_TOKENS = 1024  # holds the longest probe and its answer with any common tokenizer
_SUMMARIZE = "\n\nSay in one sentence what the text above is about."


@dataclass(frozen=True)
class Text:
    """A text to score, and its class."""

    kind: str
    text: str


@dataclass(frozen=True)
class Chat:
    """The user's turns of a chat; the reference's answers go between them."""

    kind: str  # single, multi or long
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Probes:
    """Texts and chats, with classes interleaved so that any prefix is a balanced sample."""

    texts: tuple[Text, ...]
    chats: tuple[Chat, ...]

    @property
    def digest(self) -> str:
        """Return a hash of all probes."""
        parts = [[one.kind, one.text] for one in self.texts] + [[one.kind, *one.turns] for one in self.chats]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def probes(own: Sequence[str] = (), *, samples: int = SAMPLES_PER_CLASS) -> Probes:
    """Return up to `samples` texts of each class and chats of each kind; a workload's `own` requests form a class."""
    by_class = {kind: [Text(kind, _text_of(one)) for one in catalog.texts(kind)][:samples] for kind in catalog.CLASSES}
    if own:
        by_class["workload"] = [Text("workload", text) for text in own][:samples]
    chats = catalog.texts("chat")
    single = [Chat("single", tuple(one["turns"][:1])) for one in chats[:samples]]
    multi = [Chat("multi", tuple(one["turns"][:2])) for one in chats[::-1][:samples]]
    passages = [one["text"] for one in catalog.texts("prose")]
    long = []
    for number in range(min(samples, len(passages))):
        whole = "\n\n".join(passages[number:] + passages[:number])[:_LONG_CHARACTERS]
        long.append(Chat("long", (whole + _SUMMARIZE,)))
    return Probes(tuple(_interleave(*by_class.values())), tuple(_interleave(single, multi, long)))


def _text_of(one: Mapping[str, Any]) -> str:
    return "\n".join(one.get("turns") or [one["text"]])


def _interleave(*groups: Sequence[T]) -> list[T]:
    return [one for one in chain.from_iterable(zip_longest(*groups)) if one is not None]


def scored_positions(tokens: Sequence[int]) -> list[int]:
    """Return the positions of a text that are scored: evenly spaced, after the first few tokens."""
    count = min(len(tokens), MAX_TEXT_TOKENS)
    step = max(1, (count - _SKIPPED_TOKENS) // _SCORED_POSITIONS)
    return list(range(min(_SKIPPED_TOKENS, count - 1), count, step))[:_SCORED_POSITIONS]


@dataclass(frozen=True)
class ScoredText:
    """A text with the reference's distributions at the scored positions."""

    kind: str
    tokens: tuple[int, ...]
    distributions: tuple[TokenDistribution, ...]


@dataclass(frozen=True)
class AnsweredChat:
    """A chat with the reference's answer to its last turn."""

    kind: str
    messages: tuple[dict[str, str], ...]  # up to the last question
    answer: Answer
    context_tokens: int  # prompt and answer
