"""The reference's answers to all probes and tasks, cached so that the reference runs once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.core.scoring import Answer, TokenDistribution
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluate.probes import (
    MAX_ANSWER_TOKENS,
    AnsweredChat,
    Chat,
    Probes,
    ScoredText,
    scored_positions,
)
from powerband.evaluate.tasks import Task
from powerband.store import runs

_TOKENIZER_SAMPLES = 4
_TWO_TURNS = (
    {"role": "user", "content": "My cat is called Mimi, my dog is called Rex, and the parrot is called Coco. " * 4},
    {"role": "assistant", "content": "Those are three lovely names for a cat, a dog and a parrot. " * 2},
    {"role": "user", "content": "What is the name of my dog?"},
)


@dataclass(frozen=True)
class ReferenceAnswers:
    """What the reference answered to every probe and task."""

    tokenizer_samples: tuple[tuple[str, tuple[int, ...]], ...]  # a few texts and their tokens
    texts: tuple[ScoredText, ...]
    chats: tuple[AnsweredChat, ...]
    task_scores: dict[str, tuple[float, ...]]  # by task, for each question
    history_tokens: int = 0  # that earlier turns add to a chat

    def first(self, share: float) -> ReferenceAnswers:
        """Return the answers to the first probes and questions."""
        if share >= 1:
            return self
        return ReferenceAnswers(
            self.tokenizer_samples,
            self.texts[: round(share * len(self.texts))],
            self.chats[: round(share * len(self.chats))],
            {name: scores[: round(share * len(scores))] for name, scores in self.task_scores.items()},
            self.history_tokens,
        )

    def __add__(self, more: ReferenceAnswers) -> ReferenceAnswers:
        """Return these answers followed by those to the probes and questions after them."""
        scores = {name: (*self.task_scores.get(name, ()), *later) for name, later in more.task_scores.items()}
        texts, chats = (*self.texts, *more.texts), (*self.chats, *more.chats)
        return ReferenceAnswers(self.tokenizer_samples, texts, chats, scores, self.history_tokens)

    @property
    def chat_kinds(self) -> set[str]:
        """Return the kinds of the chats."""
        return {one.kind for one in self.chats}

    @property
    def text_kinds(self) -> set[str]:
        """Return the kinds of the texts."""
        return {one.kind for one in self.texts}

    def write(self, path: Path) -> None:
        """Write the answers to a cache file."""
        data = {
            "samples": self.tokenizer_samples,
            "reads": [[one.kind, one.tokens, one.distributions] for one in self.texts],
            "answered": [[one.kind, one.messages, one.answer, one.context_tokens] for one in self.chats],
            "tasks": self.task_scores,
            "history_tokens": self.history_tokens,
        }
        runs.write_atomic(path, json.dumps(data))

    @classmethod
    def read(cls, path: Path) -> ReferenceAnswers:
        """Read the answers from a cache file."""
        data = json.loads(path.read_text())
        return cls(
            tokenizer_samples=tuple((text, tuple(tokens)) for text, tokens in data["samples"]),
            texts=tuple(ScoredText(kind, tuple(tokens), _distributions(top)) for kind, tokens, top in data["reads"]),
            chats=tuple(
                AnsweredChat(kind, tuple(messages), Answer(tuple(tokens), _distributions(top), text), context_tokens)
                for kind, messages, (tokens, top, text), context_tokens in data["answered"]
            ),
            task_scores={name: tuple(scores) for name, scores in data["tasks"].items()},
            history_tokens=data.get("history_tokens", 0),
        )


def _distributions(data: Sequence[Any]) -> tuple[TokenDistribution, ...]:
    return tuple(TokenDistribution(logprob, tuple((token, value) for token, value in top)) for logprob, top in data)


async def collect_reference_answers(
    client: EngineClient,
    probes: Probes,
    tasks: Mapping[str, Task],
    *,
    top: int,
    context: int,
    begin: float = 0.0,
    end: float = 1.0,
) -> ReferenceAnswers:
    """Run the probes and questions between two shares of them against the reference."""
    engine, model = client.engine, client.model
    probes = probes.between(begin, end)
    tokens = await client.run_all(engine.tokenize(model, one.text) for one in probes.texts)
    cut = [tuple(one[: min(text.tokens, context - 8)]) for text, one in zip(probes.texts, tokens, strict=True)]
    scorings = await client.run_all(
        engine.score(model, one, scored_positions(one, text.kind), top=top)
        for text, one in zip(probes.texts, cut, strict=True)
    )
    texts = tuple(
        ScoredText(text.kind, one, tuple(distributions))
        for text, one, distributions in zip(probes.texts, cut, scorings, strict=True)
    )
    chats = await _answer_chats(client, probes.chats, top=top, context=context)
    scores = {
        name: tuple(await task.run(client, round(begin * task.size), round(end * task.size)))
        for name, task in tasks.items()
    }
    first_texts = probes.texts[:_TOKENIZER_SAMPLES]
    samples = tuple((text.text, tuple(one)) for text, one in zip(first_texts, tokens, strict=False))
    return ReferenceAnswers(samples, texts, chats, scores, await history_tokens(client))


async def history_tokens(client: EngineClient) -> int:
    """Return how many tokens longer a chat with an earlier turn is than its last turn alone."""
    *earlier, last = _TWO_TURNS
    whole = await client.run(client.engine.render(client.model, [*earlier, last]))
    return len(whole) - len(await client.run(client.engine.render(client.model, [last])))


async def _answer_chats(
    client: EngineClient, chats: Sequence[Chat], *, top: int, context: int
) -> tuple[AnsweredChat, ...]:
    """Answer every chat turn by turn; return the last answer of each that fits the context."""
    engine, model = client.engine, client.model
    messages: list[list[dict[str, str]]] = [[] for _ in chats]
    last: list[AnsweredChat | None] = [None] * len(chats)
    for turn in range(max(len(one.turns) for one in chats)):
        active = [number for number, one in enumerate(chats) if len(one.turns) > turn]
        for number in active:
            messages[number].append({"role": "user", "content": chats[number].turns[turn]})
        prompts = await client.run_all(engine.render(model, messages[number]) for number in active)
        fitting = [
            (number, prompt)
            for number, prompt in zip(active, prompts, strict=True)
            if len(prompt) + MAX_ANSWER_TOKENS < context
        ]
        answers = await client.run_all(
            engine.answer(model, prompt, max_tokens=MAX_ANSWER_TOKENS, top=top) for _, prompt in fitting
        )
        for (number, prompt), answer in zip(fitting, answers, strict=True):
            context_tokens = len(prompt) + MAX_ANSWER_TOKENS
            last[number] = AnsweredChat(chats[number].kind, tuple(messages[number]), answer, context_tokens)
            messages[number] = [*messages[number], {"role": "assistant", "content": answer.text}]
    return tuple(one for one in last if one is not None)
