"""Questions with answers that can be checked: what a person cares about, scored in pairs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from powerband.core.statistics import Interval, quantile
from powerband.errors import InputError

Check = Literal["contains", "exact", "number", "regex"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DRAWS = 2000


class Question(NamedTuple):
    """One question of a task."""

    prompt: str
    answer: str
    check: Check = "contains"
    most: int = 32  # tokens of the answer


def read(text: str, *, source: str) -> tuple[Question, ...]:
    """Read a task file: a question on each line, as JSON with `prompt`, `answer` and, if wanted, `check` and `most`."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(Question(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{source}:{number} is not a question: {error}",
                hint='write {"prompt": "2 + 2 =", "answer": "4", "check": "number"}',
            ) from None
        if found[-1].check not in Check.__args__:  # type: ignore[attr-defined]
            raise InputError(
                f"{source}:{number}: there is no check '{found[-1].check}'", hint="contains, exact, number or regex"
            )
    if not found:
        raise InputError(f"{source} has no questions", hint="a task is a JSONL file with a question on each line")
    return tuple(found)


def right(question: Question, said: str) -> bool:
    """Tell whether an answer is right."""
    said, wanted = said.strip(), question.answer.strip()
    if question.check == "exact":
        return said.casefold() == wanted.casefold()
    if question.check == "regex":
        return re.search(wanted, said) is not None
    if question.check == "number":
        numbers = _NUMBER.findall(said)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(wanted.replace(",", ""))
    return wanted.casefold() in said.casefold()


def recovery(reference: Sequence[bool], candidate: Sequence[bool], *, level: float = 0.95, seed: int = 0) -> Interval:
    """Return the candidate's score over the reference's, with an interval from drawing the same questions for both."""
    pairs = list(zip(reference, candidate, strict=True))
    value = _ratio(pairs)
    rng = random.Random(seed)
    draws = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_DRAWS)) if pairs else [0.0]
    tail = (1 - level) / 2
    return Interval(value, quantile(draws, tail), quantile(draws, 1 - tail))


def _ratio(pairs: Iterable[tuple[bool, bool]]) -> float:
    ours, theirs = 0, 0
    for one, other in pairs:
        ours, theirs = ours + one, theirs + other
    return theirs / ours if ours else 0.0
