"""What both deployments are asked: texts to be read, chats to be answered."""

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
_SCORED = 16  # places of a text
_SKIPPED = 16  # tokens at its beginning, where anything may follow
LONGEST = 320  # tokens of a text that are read
MOST = 32  # tokens of an answer
SAMPLES = 24  # texts of each class
_LONG_CHARACTERS = 2200
ROOM = 1024  # tokens that hold the longest of them, whatever the vocabulary
_TASK = "\n\nSay in one sentence what the text above is about."


@dataclass(frozen=True)
class Text:
    """A text of one class."""

    kind: str
    text: str


@dataclass(frozen=True)
class Chat:
    """What users say; the reference's own answers stand between."""

    kind: str  # single, multi or long
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Probes:
    """All of it, the classes taking turns so that every beginning is a fair sample."""

    texts: tuple[Text, ...]
    chats: tuple[Chat, ...]

    @property
    def digest(self) -> str:
        """Return what tells these from others."""
        parts = [[one.kind, one.text] for one in self.texts] + [[one.kind, *one.turns] for one in self.chats]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def probes(own: Sequence[str] = (), *, samples: int = SAMPLES) -> Probes:
    """Return texts of every class, as many chats of every kind, and a workload's own requests as a class."""
    by_class = {kind: [Text(kind, _whole(one)) for one in catalog.texts(kind)][:samples] for kind in catalog.CLASSES}
    if own:
        by_class["workload"] = [Text("workload", text) for text in own][:samples]
    spoken = catalog.texts("chat")
    single = [Chat("single", tuple(one["turns"][:1])) for one in spoken[:samples]]
    multi = [Chat("multi", tuple(one["turns"][:2])) for one in spoken[::-1][:samples]]
    passages = [one["text"] for one in catalog.texts("prose")]
    long = []
    for number in range(min(samples, len(passages))):
        whole = "\n\n".join(passages[number:] + passages[:number])[:_LONG_CHARACTERS]
        long.append(Chat("long", (whole + _TASK,)))
    return Probes(tuple(_turns(*by_class.values())), tuple(_turns(single, multi, long)))


def _whole(one: Mapping[str, Any]) -> str:
    return "\n".join(one.get("turns") or [one["text"]])


def _turns(*groups: Sequence[T]) -> list[T]:
    return [one for one in chain.from_iterable(zip_longest(*groups)) if one is not None]


def places(tokens: Sequence[int]) -> list[int]:
    """Return which places of a text are scored: evenly spread, none at its very beginning."""
    count = min(len(tokens), LONGEST)
    step = max(1, (count - _SKIPPED) // _SCORED)
    return list(range(min(_SKIPPED, count - 1), count, step))[:_SCORED]


@dataclass(frozen=True)
class Read:
    """A text as the reference read it."""

    kind: str
    tokens: tuple[int, ...]
    spots: tuple[TokenDistribution, ...]


@dataclass(frozen=True)
class Answered:
    """A chat as the reference answered it."""

    kind: str
    messages: tuple[dict[str, str], ...]  # up to the last question
    answer: Answer
    room: int  # tokens that it takes, answer included
