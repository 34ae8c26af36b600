"""Questions with answers that can be checked: what a person cares about, scored in pairs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from powerband.core.statistics import UNBOUND, Interval, paired_ratio, student, z_of
from powerband.errors import InputError

Check = Literal["contains", "exact", "number", "regex"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


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


def recovery(reference: Sequence[float], candidate: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the candidate's score over the reference's, with an interval that knows they had the same questions."""
    pairs = list(zip(reference, candidate, strict=True))
    if all(one in (0.0, 1.0) for pair in pairs for one in pair):
        both, first, second = (pairs.count(pair) for pair in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
        return paired_ratio(both, first, second, level=level)
    ours, theirs = math.fsum(reference), math.fsum(candidate)
    if ours <= 0 or len(pairs) < 2:
        return Interval(0.0, 0.0, UNBOUND)
    ratio, count = theirs / ours, len(pairs)
    spread = math.sqrt(math.fsum((b - ratio * a) ** 2 for a, b in pairs) * count / (count - 1)) / ours
    reach = student(count - 1, z_of(level)) * spread
    return Interval(ratio, ratio - reach, ratio + reach)
