"""A task of our own that needs no data, easy enough for the smallest models: tell again what the question says."""

from __future__ import annotations

import random

from powerband.evaluators.tasks import Question

_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Lucas", "Maria",
    "Nadia", "Oscar", "Paula", "Quinn", "Robin", "Simon", "Tanya", "Ursula", "Victor", "Wendy", "Xavier",
)  # fmt: skip
_THINGS = (
    "lamp", "drum", "kite", "boat", "clock", "chair", "guitar", "ladder", "hammer", "bottle", "camera", "carpet",
    "basket", "candle", "helmet", "mirror", "pencil", "rocket", "saddle", "teapot", "violin", "wallet", "anchor",
    "button",
)  # fmt: skip


def questions(count: int) -> tuple[Question, ...]:
    """Return the task, the same at every call: sentences to repeat, and things to tell again, in turns."""
    rng, found = random.Random(20), []
    for number in range(count):
        (name, other), (thing, another) = rng.sample(_NAMES, 2), rng.sample(_THINGS, 2)
        if number % 2:
            lines = [f"{name} has a {thing}.", f"{other} has a {another}."]
            rng.shuffle(lines)
            found.append(Question("\n".join(lines) + f"\n\nWhat does {name} have?", f"{name} has a {thing}", most=16))
        else:
            sentence = f"{name} has {rng.randrange(2, 99)} {thing}s."
            found.append(Question(f"Repeat this sentence word for word: {sentence}", sentence, most=16))
    return tuple(found)
