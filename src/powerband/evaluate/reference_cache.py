"""What the reference said, kept so that it is asked once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.core.scoring import Answer, TokenDistribution
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluate.probes import LONGEST, MOST, Answered, Chat, Probes, Read, places
from powerband.evaluate.tasks import Task
from powerband.store import runs

_SAMPLES = 4


@dataclass(frozen=True)
class ReferenceAnswers:
    """The reference's word on every probe."""

    samples: tuple[tuple[str, tuple[int, ...]], ...]  # some texts and their tokens
    reads: tuple[Read, ...]
    answered: tuple[Answered, ...]
    tasks: dict[str, tuple[float, ...]]  # each question's score

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of chats."""
        return {one.kind for one in self.answered}

    def write(self, path: Path) -> None:
        """Keep them."""
        data = {
            "samples": self.samples,
            "reads": [[one.kind, one.tokens, one.spots] for one in self.reads],
            "answered": [[one.kind, one.messages, one.answer, one.room] for one in self.answered],
            "tasks": self.tasks,
        }
        runs.write_atomic(path, json.dumps(data))

    @classmethod
    def read(cls, path: Path) -> ReferenceAnswers:
        """Read them back."""
        data = json.loads(path.read_text())
        return cls(
            samples=tuple((text, tuple(tokens)) for text, tokens in data["samples"]),
            reads=tuple(Read(kind, tuple(tokens), _spots(spots)) for kind, tokens, spots in data["reads"]),
            answered=tuple(
                Answered(kind, tuple(messages), Answer(tuple(tokens), _spots(spots), text), room)
                for kind, messages, (tokens, spots, text), room in data["answered"]
            ),
            tasks={name: tuple(scores) for name, scores in data["tasks"].items()},
        )


def _spots(data: Sequence[Any]) -> tuple[TokenDistribution, ...]:
    return tuple(TokenDistribution(logprob, tuple((token, value) for token, value in top)) for logprob, top in data)


async def ask_reference(
    asker: EngineClient, probes: Probes, exams: Mapping[str, Task], *, top: int, context: int
) -> ReferenceAnswers:
    """Ask all of it."""
    engine, model = asker.engine, asker.model
    tokens = await asker.hold_all(engine.tokenize(model, one.text) for one in probes.texts)
    cut = [tuple(one[: min(LONGEST, context - 8)]) for one in tokens]
    spots = await asker.hold_all(engine.score(model, one, places(one), top=top) for one in cut)
    reads = tuple(Read(text.kind, one, tuple(found)) for text, one, found in zip(probes.texts, cut, spots, strict=True))
    answered = await _converse(asker, probes.chats, top=top, context=context)
    scores = {name: tuple(await exam.sit(asker, 0, exam.size)) for name, exam in exams.items()}
    samples = tuple((text.text, tuple(one)) for text, one in zip(probes.texts[:_SAMPLES], tokens, strict=False))
    return ReferenceAnswers(samples, reads, answered, scores)


async def _converse(asker: EngineClient, chats: Sequence[Chat], *, top: int, context: int) -> tuple[Answered, ...]:
    """Answer every chat turn by turn; what comes of the last turn is kept."""
    engine, model = asker.engine, asker.model
    said: list[list[dict[str, str]]] = [[] for _ in chats]
    last: list[Answered | None] = [None] * len(chats)
    for turn in range(max(len(one.turns) for one in chats)):
        speaking = [number for number, one in enumerate(chats) if len(one.turns) > turn]
        for number in speaking:
            said[number].append({"role": "user", "content": chats[number].turns[turn]})
        prompts = await asker.hold_all(engine.render(model, said[number]) for number in speaking)
        fitting = [
            (number, prompt) for number, prompt in zip(speaking, prompts, strict=True) if len(prompt) + MOST < context
        ]
        answers = await asker.hold_all(engine.answer(model, prompt, most=MOST, top=top) for _, prompt in fitting)
        for (number, prompt), answer in zip(fitting, answers, strict=True):
            room = len(prompt) + MOST
            last[number] = Answered(chats[number].kind, tuple(said[number]), answer, room)
            said[number] = [*said[number], {"role": "assistant", "content": answer.text}]
    return tuple(one for one in last if one is not None)
