"""Probes: the texts that both deployments score, and the chats that both answer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
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
_SHORT_TRAFFIC_TOKENS = 1000  # the usual chats with a long context have about 600
LATE, DEPTH = "late", "depth"  # kinds of texts and chats that are as long as the traffic
_LATE_TOKENS, _MIN_LATE, _MAX_LATE = 48_000, 2, 12  # tokens of all late texts together, and their number
_CHARACTERS_PER_TOKEN = 3.5  # of prose, at least with most tokenizers
_DEPTHS = (0.1, 0.5, 0.9)
MIN_CONTEXT_TOKENS = 1024  # holds the longest probe and its answer with any common tokenizer
_SUMMARIZE = "\n\nSay in one sentence what the text above is about."


@dataclass(frozen=True)
class Text:
    """A text to score, and its class."""

    kind: str
    text: str
    tokens: int = MAX_TEXT_TOKENS  # at most; the rest is cut


@dataclass(frozen=True)
class Chat:
    """The user's turns of a chat; the reference's answers go between them."""

    kind: str  # single, multi, long or depth
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Probes:
    """Texts and chats, with classes interleaved so that any prefix is a balanced sample."""

    texts: tuple[Text, ...]
    chats: tuple[Chat, ...]

    def between(self, begin: float, end: float) -> Probes:
        """Return the probes between two shares of them."""

        def part(some: tuple[T, ...]) -> tuple[T, ...]:
            return some[round(begin * len(some)) : round(end * len(some))]

        return Probes(part(self.texts), part(self.chats))

    @property
    def digest(self) -> str:
        """Return a hash of all probes."""
        parts = [[one.kind, one.text, one.tokens] for one in self.texts] + [
            [one.kind, *one.turns] for one in self.chats
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


NO_PROBES = Probes((), ())


def probes(own: Sequence[str] = (), *, samples: int = SAMPLES_PER_CLASS, traffic_tokens: int = 0) -> Probes:
    """Return up to `samples` texts of each class and chats of each kind; a workload's `own` requests form a class.

    If requests with their answers are longer than the usual probes, there are texts and chats of that length too.
    """
    late, depth = _long_probes(traffic_tokens) if traffic_tokens > _SHORT_TRAFFIC_TOKENS else ([], [])
    return _probes(catalog.texts, own, slice(samples), late, depth)


def reserve(own: Sequence[str] = (), *, samples: int = SAMPLES_PER_CLASS) -> Probes:
    """Return the probes for a verdict that is undecided: what `probes` left over, and the catalogue's reserve."""
    return _probes(lambda kind: catalog.texts(kind) + catalog.reserve_texts(kind), own, slice(samples, None))


def _probes(
    samples_of: Callable[[str], Sequence[dict[str, Any]]],
    own: Sequence[str],
    chosen: slice,
    late: Sequence[Text] = (),
    depth: Sequence[Chat] = (),
) -> Probes:
    by_class = {kind: [Text(kind, _text_of(one)) for one in samples_of(kind)][chosen] for kind in catalog.CLASSES}
    if own:
        by_class["workload"] = [Text("workload", text) for text in own][chosen]
    chats = samples_of("chat")
    single = [Chat("single", tuple(one["turns"][:1])) for one in chats[chosen]]
    first = len(catalog.texts("chat"))  # single and multi-turn chats begin at opposite ends of these
    multi = [Chat("multi", tuple(one["turns"][:2])) for one in [*chats[:first][::-1], *chats[first:]][chosen]]
    passages = [one["text"] for one in samples_of("prose")]
    long = []
    for number in range(len(passages))[chosen]:
        whole = "\n\n".join(passages[number:] + passages[:number])[:_LONG_CHARACTERS]
        long.append(Chat("long", (whole + _SUMMARIZE,)))
    return Probes(tuple(_interleave(*by_class.values(), late)), tuple(_interleave(single, multi, long, depth)))


def _long_probes(tokens: int) -> tuple[list[Text], list[Chat]]:
    """Return texts of a length, to score near their end, and chats of that length about a fact at some depth."""
    count = max(_MIN_LATE, min(_MAX_LATE, _LATE_TOKENS // tokens))
    characters = round(_CHARACTERS_PER_TOKEN * tokens)
    passages = [one["text"] for one in catalog.texts("prose")] + [_text_of(one) for one in catalog.texts("maths")]
    texts = [Text(LATE, _long_text(passages, number, 2 * characters), tokens) for number in range(count)]
    chats = []
    for number in range(count):
        passage = _long_text(passages, number + count, characters - 600)
        place = passage.rfind(" ", 0, max(1, round(_DEPTHS[number % len(_DEPTHS)] * len(passage))))
        fact = f" Remember this code: {random.Random(f'code {number}').randrange(100_000, 1_000_000)}. "
        prompt = f"{passage[:place]}{fact}{passage[place:]}\n\nWhat is the code in the text above?"
        chats.append(Chat(DEPTH, (prompt,)))
    return texts, chats


def _long_text(passages: Sequence[str], number: int, characters: int) -> str:
    """Return passages in an order that depends on a number, up to a length; after the last one they repeat."""
    order = random.Random(f"late {number}").sample(passages, len(passages))
    parts: list[str] = []
    while sum(map(len, parts)) < characters:
        parts += order
    return "\n\n".join(parts)[:characters]


def _text_of(one: Mapping[str, Any]) -> str:
    return "\n".join(one.get("turns") or [one["text"]])


def _interleave(*groups: Sequence[T]) -> list[T]:
    return [one for one in chain.from_iterable(zip_longest(*groups)) if one is not None]


def scored_positions(tokens: Sequence[int], kind: str = "") -> list[int]:
    """Return the positions of a text that are scored: evenly spaced, of a late text in its last quarter."""
    if kind == LATE:
        begin = 3 * len(tokens) // 4
        return list(range(begin, len(tokens), max(1, (len(tokens) - begin) // _SCORED_POSITIONS)))[:_SCORED_POSITIONS]
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
