"""The stage `evaluate`: judge a deployment as it will be served against the reference."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from powerband.core.evaluation import Evaluation, Figure, Pair
from powerband.core.quality import FIDELITY, QualityFloor
from powerband.core.scoring import Answer
from powerband.core.statistics import wilson
from powerband.errors import InputError
from powerband.evaluate import judge
from powerband.evaluate.asking import Asker
from powerband.evaluate.notes import Notes, answers, ask_reference
from powerband.evaluate.probes import MOST, Answered, Probes, Read, places
from powerband.evaluators import fidelity, tasks
from powerband.evaluators.fidelity import Compared
from powerband.evaluators.tasks import Question
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime import weights
from powerband.store import runs

TOP = 20  # likeliest tokens that are compared; what vLLM tells without being asked for more
_TEXTS, _CHATS, _QUESTIONS = 24, 9, 20  # of one batch, after which the verdict is looked at
_PEEK = 0.99  # the level of intervals while it may still go on: looking often finds what is not there
_WORST = 12
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What to judge by."""

    floor: QualityFloor
    probes: Probes
    tasks: Mapping[str, tuple[Question, ...]] = field(default_factory=dict)


@dataclass
class Seen:
    """What the candidate has shown so far."""

    texts: list[Compared] = field(default_factory=list)
    spoiled: dict[str, list[bool]] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)


async def evaluate(
    reference: Prepared, candidate: Prepared, order: Order, *, progress: Progress = lambda _: None
) -> Evaluation:
    """Ask the reference, or remember what it said; ask the candidate until the verdict is clear."""
    engine_s: dict[str, float] = {}
    notes = await _notes(reference, order, engine_s, progress)
    seen, stopped = Seen(), False
    progress("start the candidate")
    async with local.launch(candidate) as replica:
        at_once, context = _room(candidate)
        began = time.monotonic()
        async with Asker(replica, await replica.model_name(), at_once=at_once) as asker:
            await _same_tokens(asker, notes)
            for batch in _batches(notes, context):
                await batch.ask(asker, seen)
                found = _figures(order, notes, seen, level=_PEEK)
                verdict, reason = judge.verdict(order.floor, found)
                progress(f"{len(seen.texts)} texts, {sum(map(len, seen.spoiled.values()))} answers: {verdict}")
                if verdict == "fail" or (verdict == "pass" and all(seen.spoiled.get(kind) for kind in notes.kinds)):
                    stopped = not batch.last
                    break
        engine_s["candidate"] = round(time.monotonic() - began, 1)
    figures = _figures(order, notes, seen, level=_PEEK if stopped else 0.95)
    verdict, reason = judge.verdict(order.floor, figures)
    return Evaluation(
        name=candidate.deployment.served_name,
        reference=reference.deployment.served_name,
        candidate=candidate.deployment.served_name,
        floor=order.floor,
        figures=tuple(figures),
        verdict=verdict,
        reason=reason,
        worst=tuple(seen.pairs[:_WORST]),
        stopped_early=stopped,
        engine_s=engine_s,
        provenance={
            "reference": reference.deployment.to_data(),
            "candidate": candidate.deployment.to_data(),
            "probes": order.probes.digest,
            "engines": {one.engine.name: one.installation.version for one in (reference, candidate)},
        },
    )


async def _notes(reference: Prepared, order: Order, engine_s: dict[str, float], progress: Progress) -> Notes:
    """Return what the reference said of these probes; it is asked once."""
    told = {
        "deployment": reference.deployment.to_data(),
        "weights": weights.digest(reference.deployment.variant.source),
        "version": reference.installation.version,
        "probes": order.probes.digest,
        "tasks": {name: [list(one) for one in questions] for name, questions in order.tasks.items()},
        "top": TOP,
    }
    path = Notes.place(runs.state_root() / "references", json.dumps(told, sort_keys=True, default=str))
    if path.is_file():
        return Notes.read(path)
    progress("start the reference")
    at_once, context = _room(reference)
    async with local.launch(reference) as replica:
        began = time.monotonic()
        async with Asker(replica, await replica.model_name(), at_once=at_once) as asker:
            progress("ask the reference; its answers are kept")
            notes = await ask_reference(asker, order.probes, order.tasks, top=TOP, context=context)
        engine_s["reference"] = round(time.monotonic() - began, 1)
    notes.write(path)
    return notes


def _room(prepared: Prepared) -> tuple[int, int]:
    """Return how many talks may be held at once, and the tokens that each may take."""
    if prepared.engine.scheduling is None:
        raise InputError(
            f"'{prepared.engine.name}' does not tell log-probabilities", hint="evaluate vllm or llamacpp deployments"
        )
    choice = prepared.engine.choice_of(prepared.deployment, model=prepared.model, host=prepared.host)
    return min(4, choice.sequences), choice.context


async def _same_tokens(asker: Asker, notes: Notes) -> None:
    """Refuse to compare models that do not share a vocabulary."""
    for text, tokens in notes.samples:
        if list(tokens) != await asker.hold(asker.engine.tokenize(asker.model, text)):
            raise InputError(
                "the two deployments cut the same text into different tokens",
                hint="a candidate is the reference's own model in another form",
            )


@dataclass(frozen=True)
class Batch:
    """Some of everything."""

    reads: Sequence[Read]
    chats: Sequence[Answered]
    questions: Mapping[str, Sequence[tuple[Question, bool]]]
    last: bool

    async def ask(self, asker: Asker, seen: Seen) -> None:
        """Ask the candidate, and note how it compares."""
        engine, model = asker.engine, asker.model
        talks = [engine.score(model, one.tokens, places(one.tokens), top=TOP) for one in self.reads]
        for read, spots in zip(self.reads, await asker.hold_all(talks), strict=True):
            seen.texts.append(fidelity.compare(read.kind, read.spots, spots))
        prompts = await asker.hold_all(engine.render(model, one.messages) for one in self.chats)
        replies = await asker.hold_all(engine.answer(model, prompt, most=MOST, top=1) for prompt in prompts)
        for chat, answer in zip(self.chats, replies, strict=True):
            self._note(chat, answer, seen)
        for name, questions in self.questions.items():
            said = await answers(asker, [question for question, _ in questions])
            seen.right.setdefault(name, []).extend(
                tasks.right(question, one) for (question, _), one in zip(questions, said, strict=True)
            )

    def _note(self, chat: Answered, answer: Answer, seen: Seen) -> None:
        spoiled = fidelity.spoiled(chat.answer.tokens, chat.answer.places, answer.tokens)
        seen.spoiled.setdefault(chat.kind, []).append(spoiled)
        if spoiled:
            question = chat.messages[-1]["content"]
            seen.pairs.append(
                Pair(kind=chat.kind, question=question[-600:], reference=chat.answer.text, candidate=answer.text)
            )


def _batches(notes: Notes, context: int) -> Iterator[Batch]:
    """Yield what the reference was asked, some of everything at a time, as far as the candidate has room for it."""
    chats = [one for one in notes.answered if one.room < context]
    pairs = {name: list(zip(*told, strict=True)) for name, told in notes.tasks.items()}
    sizes = [(len(notes.reads), _TEXTS), (len(chats), _CHATS), *((len(one), _QUESTIONS) for one in pairs.values())]
    rounds = max(-(-count // size) for count, size in sizes)
    for turn in range(rounds):
        yield Batch(
            notes.reads[turn * _TEXTS : (turn + 1) * _TEXTS],
            chats[turn * _CHATS : (turn + 1) * _CHATS],
            {name: one[turn * _QUESTIONS : (turn + 1) * _QUESTIONS] for name, one in pairs.items()},
            last=turn == rounds - 1,
        )


def _figures(order: Order, notes: Notes, seen: Seen, *, level: float) -> list[Figure]:
    """Return every figure, of all texts and of each class; the floor bounds those of all texts."""
    bounds, found = order.floor.fidelity, []
    for name, what in fidelity.FIGURES.items():
        for kind in ("", *sorted({one.kind for one in seen.texts})):
            texts = [one for one in seen.texts if kind in ("", one.kind)]
            if texts:
                interval = fidelity.interval(texts, what, level=level)
                found.append(judge.figure(name, kind, interval, len(texts), None if kind else bounds.get(name)))
    for kind, told in seen.spoiled.items():
        name = f"spoiled_{kind}"
        assert name in FIDELITY
        found.append(judge.figure(name, "", wilson(sum(told), len(told)), len(told), bounds.get(name)))
    for name, right in seen.right.items():
        reference = notes.tasks[name][1][: len(right)]
        floor = order.floor.tasks.get(name)
        interval = tasks.recovery(reference, right, level=level)
        found.append(judge.figure(f"{name} recovery", "", interval, len(right), floor.recovery if floor else None))
    return found
