"""Tasks that a running deployment sits: questions with checks, or a task of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from powerband import catalog
from powerband.errors import EngineFailed
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluators import lm_eval, questions
from powerband.evaluators.questions import Question
from powerband.runtime import installations


class Task(Protocol):
    """A task: so many questions, each of which scores something."""

    @property
    def size(self) -> int:
        """Return how many questions there are."""

    @property
    def digest(self) -> str:
        """Return what tells this task from others."""

    async def sit(self, asker: EngineClient, begin: int, end: int) -> list[float]:
        """Ask some of the questions; return each one's score."""


@dataclass(frozen=True)
class QuestionTask:
    """Questions of our own or of the user."""

    questions: tuple[Question, ...]

    @property
    def size(self) -> int:
        """All of them."""
        return len(self.questions)

    @property
    def digest(self) -> str:
        """By every word."""
        return hashlib.sha256(json.dumps(self.questions).encode()).hexdigest()

    async def sit(self, asker: EngineClient, begin: int, end: int) -> list[float]:
        """Each question is a chat of its own."""
        engine, model, asked = asker.engine, asker.model, self.questions[begin:end]
        chats = [[{"role": "user", "content": one.prompt}] for one in asked]
        prompts = await asker.hold_all(engine.render(model, chat) for chat in chats)
        talks = [engine.answer(model, prompt, most=one.most, top=1) for prompt, one in zip(prompts, asked, strict=True)]
        said = await asker.hold_all(talks)
        return [float(questions.right(one, answer.text)) for one, answer in zip(asked, said, strict=True)]


@dataclass(frozen=True)
class HarnessTask:
    """A task of lm-evaluation-harness on local data; its rows are taken from all over the file."""

    task: str
    data: Path
    python: str
    tokenizer: str
    rows: Sequence[int]

    @property
    def size(self) -> int:
        """The rows that were chosen."""
        return len(self.rows)

    @property
    def digest(self) -> str:
        """By the data, the rows and how they are asked."""
        parts = [self.data.read_text(), json.dumps([self.task, list(self.rows)])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    async def sit(self, asker: EngineClient, begin: int, end: int) -> list[float]:
        """One process asks them all."""
        chosen = self.rows[begin:end]
        if not chosen:
            return []
        with tempfile.TemporaryDirectory(prefix="powerband-") as name:
            folder = Path(name)
            lm_eval.write(folder, catalog.text("task", self.task), self.data.resolve())
            step = lm_eval.command(
                self.python,
                self.task,
                folder=folder,
                url=asker.url,
                model=asker.model,
                tokenizer=self.tokenizer,
                samples=chosen,
                at_once=asker.at_once,
            )
            if last := await installations.run_step(step, log=folder / "log"):
                raise EngineFailed(
                    f"lm-eval could not ask {self.task}: {last}", hint="is it a task's own data?", failure="no_answer"
                )
            return lm_eval.scores(folder, chosen)


def spread(rows: Sequence[int], count: int) -> list[int]:
    """Return so many rows from all over, in an order whose every beginning is from all over too."""
    wanted = min(count, len(rows))
    chosen = [rows[number * len(rows) // wanted] for number in range(wanted)]
    return [row for offset in range(8) for row in chosen[_MIXED[offset] :: 8]]


_MIXED = (0, 4, 2, 6, 1, 5, 3, 7)
