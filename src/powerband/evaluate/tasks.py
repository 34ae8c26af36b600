"""Tasks to run against a deployment: questions with checkable answers, or a task of lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from powerband import catalog
from powerband.errors import EngineFailed
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluators import lm_eval, questions
from powerband.evaluators.questions import Question
from powerband.runtime import installations


class Task(Protocol):
    """A list of questions, each with a score."""

    @property
    def size(self) -> int:
        """Return the number of questions."""

    @property
    def digest(self) -> str:
        """Return a hash of the questions, for cache keys."""

    async def run(self, client: EngineClient, begin: int, end: int) -> list[float]:
        """Ask the questions from `begin` up to `end`; return the score of each."""

    @property
    def further(self) -> Task | None:
        """Return the questions that are asked only if the verdict is undecided."""


@dataclass(frozen=True)
class QuestionTask:
    """Questions from the built-in `recall` task or from a user's file."""

    questions: tuple[Question, ...]
    reserve: tuple[Question, ...] = ()  # asked only if the verdict is undecided

    @property
    def further(self) -> Task | None:
        """Return the reserve."""
        return QuestionTask(self.reserve) if self.reserve else None

    @property
    def size(self) -> int:
        """Return the number of questions."""
        return len(self.questions)

    @property
    def digest(self) -> str:
        """Return a hash of all questions and their answers."""
        return hashlib.sha256(json.dumps(self.questions).encode()).hexdigest()

    async def run(self, client: EngineClient, begin: int, end: int) -> list[float]:
        """Ask each question in a separate chat; a correct answer scores 1."""
        engine, model, chosen = client.engine, client.model, self.questions[begin:end]
        chats = [[{"role": "user", "content": one.prompt}] for one in chosen]
        prompts = await client.run_all(engine.render(model, chat) for chat in chats)
        answers = await client.run_all(
            engine.answer(model, prompt, max_tokens=one.most, top=1)
            for prompt, one in zip(prompts, chosen, strict=True)
        )
        return [float(questions.is_correct(one, answer.text)) for one, answer in zip(chosen, answers, strict=True)]


@dataclass(frozen=True)
class HarnessTask:
    """A task of lm-evaluation-harness on selected rows of a local file."""

    task: str
    data: Path
    python: str
    tokenizer: str
    rows: Sequence[int]
    reserve: Sequence[int] = ()  # rows that are scored only if the verdict is undecided

    @property
    def further(self) -> Task | None:
        """Return the reserve."""
        return replace(self, rows=self.reserve, reserve=()) if self.reserve else None

    @property
    def size(self) -> int:
        """Return the number of selected rows."""
        return len(self.rows)

    @property
    def digest(self) -> str:
        """Return a hash of the data, the task and the selected rows."""
        parts = [self.data.read_text(), json.dumps([self.task, list(self.rows)])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    async def run(self, client: EngineClient, begin: int, end: int) -> list[float]:
        """Score the rows in one lm-eval process."""
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
                url=client.url,
                model=client.model,
                tokenizer=self.tokenizer,
                samples=chosen,
                concurrency=client.concurrency,
            )
            if error := await installations.run_step(step, log=folder / "log"):
                raise EngineFailed(
                    f"lm-eval failed on {self.task}: {error}",
                    hint=f"check that {self.data} has the data set's own fields",
                    failure="no_answer",
                )
            return lm_eval.scores(folder, chosen)


def spread(rows: Sequence[int], count: int) -> list[int]:
    """Return up to `count` evenly spaced rows, ordered so that each eighth of them spans all rows."""
    size = min(count, len(rows))
    chosen = [rows[number * len(rows) // size] for number in range(size)]
    return [row for offset in range(8) for row in chosen[_OFFSETS[offset] :: 8]]


_OFFSETS = (0, 4, 2, 6, 1, 5, 3, 7)  # bit-reversed, so that successive eighths fill the gaps evenly
