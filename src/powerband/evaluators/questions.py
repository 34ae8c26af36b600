"""Questions with checkable answers, and recovery: the candidate's score relative to the reference's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from powerband.core.statistics import UNBOUNDED, Interval, paired_ratio, student_t, z_of
from powerband.errors import InputError

Check = Literal["contains", "exact", "number", "regex"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Question(NamedTuple):
    """One question of a task; the fields are the keys of a line in a task file."""

    prompt: str
    answer: str
    check: Check = "contains"
    most: int = 32  # maximum tokens of the answer


def read(text: str, *, source: str) -> tuple[Question, ...]:
    """Read a task file: JSON lines with `prompt`, `answer` and optionally `check` and `most` (answer tokens)."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(Question(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{source}:{number}: not a valid question: {error}",
                hint='write {"prompt": "2 + 2 =", "answer": "4", "check": "number"}',
            ) from None
        if found[-1].check not in Check.__args__:  # type: ignore[attr-defined]
            raise InputError(
                f"{source}:{number}: unknown check '{found[-1].check}'", hint="use contains, exact, number or regex"
            )
    if not found:
        raise InputError(f"{source} contains no questions", hint="write one JSON object with a question on each line")
    return tuple(found)


def is_correct(question: Question, answer: str) -> bool:
    """Return whether an answer passes the question's check."""
    answer, expected = answer.strip(), question.answer.strip()
    if question.check == "exact":
        return answer.casefold() == expected.casefold()
    if question.check == "regex":
        return re.search(expected, answer) is not None
    if question.check == "number":
        numbers = _NUMBER.findall(answer)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(expected.replace(",", ""))
    return expected.casefold() in answer.casefold()


def recovery(reference: Sequence[float], candidate: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the candidate's score over the reference's, with a confidence interval for paired samples."""
    pairs = list(zip(reference, candidate, strict=True))
    if all(one in (0.0, 1.0) for pair in pairs for one in pair):
        both, first, second = (pairs.count(pair) for pair in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
        return paired_ratio(both, first, second, level=level)
    ours, theirs = math.fsum(reference), math.fsum(candidate)
    if ours <= 0 or len(pairs) < 2:
        return Interval(0.0, 0.0, UNBOUNDED)
    ratio, count = theirs / ours, len(pairs)
    error = math.sqrt(math.fsum((b - ratio * a) ** 2 for a, b in pairs) * count / (count - 1)) / ours
    margin = student_t(count - 1, z_of(level)) * error
    return Interval(ratio, ratio - margin, ratio + margin)
