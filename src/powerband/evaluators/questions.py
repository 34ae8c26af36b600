"""Questions with checkable answers, and recovery: the candidate's score relative to the reference's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast, get_args

from powerband.core import plain_data
from powerband.core.statistics import UNBOUNDED, Interval, paired_ratio, student_t, z_of
from powerband.errors import InputError

_MAX_ANSWER_TOKENS = 100_000
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
            found.append(_question(**plain_data.parse_json_object(line)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{source}:{number}: not a valid question: {error}"[:500],
                hint='write {"prompt": "2 + 2 =", "answer": "4", "check": "number"}',
            ) from None
    if not found:
        raise InputError(f"{source} contains no questions", hint="write one JSON object with a question on each line")
    return tuple(found)


def _question(prompt: str, answer: str, check: str = "contains", most: int = 32) -> Question:
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise TypeError("'prompt' and 'answer' are texts")
    if check not in get_args(Check):
        raise ValueError(f"unknown check '{check}'; use contains, exact, number or regex")
    if check == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            raise ValueError(f"the answer is not a regular expression: {error}") from None
    if not isinstance(most, int) or not 0 < most <= _MAX_ANSWER_TOKENS:
        raise ValueError(f"'most' is a number of tokens up to {_MAX_ANSWER_TOKENS:,}")
    return Question(prompt, answer, cast(Check, check), most)


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
