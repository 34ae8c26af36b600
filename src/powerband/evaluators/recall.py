"""The built-in task `recall`: repeat a fact from the prompt. It needs no data, and the smallest models can do it."""

from __future__ import annotations

import random

from powerband.evaluators.questions import Question

_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Lucas", "Maria",
    "Nadia", "Oscar", "Paula", "Quinn", "Robin", "Simon", "Tanya", "Ursula", "Victor", "Wendy", "Xavier",
)  # fmt: skip
_THINGS = (
    "lamp", "drum", "kite", "boat", "clock", "chair", "guitar", "ladder", "hammer", "bottle", "camera", "carpet",
    "basket", "candle", "helmet", "mirror", "pencil", "rocket", "saddle", "teapot", "violin", "wallet", "anchor",
    "button",
)  # fmt: skip
_TEMPLATES = (
    ("{name} has {count} {thing}s. How many {thing}s does {name} have?", "{count}"),
    ("Repeat this sentence word for word: {name} has {count} {thing}s.", "{name} has {count} {thing}s."),
    (
        "Repeat this sentence word for word: {name} put the {thing} on the table.",
        "{name} put the {thing} on the table.",
    ),
)


def questions(count: int) -> tuple[Question, ...]:
    """Return the first `count` questions; they are the same in every call, and the templates alternate."""
    rng, found = random.Random(20), []
    for number in range(count):
        values = {"name": rng.choice(_NAMES), "thing": rng.choice(_THINGS), "count": rng.randrange(11, 99)}
        prompt, answer = _TEMPLATES[number % len(_TEMPLATES)]
        found.append(Question(prompt.format(**values), answer.format(**values), most=16))
    return tuple(found)
