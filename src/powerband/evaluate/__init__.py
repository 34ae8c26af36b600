"""The stage `evaluate`: judge a deployment as it will be served against the reference."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from powerband.core.evaluation import Evaluation, Figure, Pair
from powerband.core.quality import FIDELITY, QualityFloor
from powerband.core.scoring import Answer
from powerband.core.statistics import wilson, z_of
from powerband.errors import InputError
from powerband.evaluate import gate
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluate.probes import MOST, Answered, Probes, Read, places
from powerband.evaluate.reference_cache import ReferenceAnswers, ask_reference
from powerband.evaluate.tasks import Task
from powerband.evaluators import fidelity, questions
from powerband.evaluators.fidelity import Compared
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime import model_files
from powerband.runtime.replica import Replica
from powerband.store import documents, runs

TOP = 20  # likeliest tokens that are compared; what vLLM tells without being asked for more
LOOKS = (0.125, 0.25, 0.5, 1.0)  # shares of everything that is asked, after which the verdict is looked at
QUESTIONS = 200  # of each task, unless told otherwise
LEVEL = 1 - 0.05 / len(LOOKS)  # of intervals, so that all looks together err as seldom as one of 95 %
_WORST = 12
Progress = Callable[[str], None]


@dataclass(frozen=True)
class EvaluateSpec:
    """What to judge by."""

    floor: QualityFloor
    probes: Probes
    tasks: Mapping[str, Task] = field(default_factory=dict)
    whole: bool = False  # ask everything, however clear it is
    again: bool = False  # even if the same was judged before


@dataclass
class Progression:
    """What the candidate has shown so far."""

    texts: list[Compared] = field(default_factory=list)
    spoiled: dict[str, list[bool]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)


async def evaluate(
    reference: Prepared,
    candidate: Prepared,
    order: EvaluateSpec,
    *,
    running: Replica | None = None,
    progress: Progress = lambda _: None,
) -> Evaluation:
    """Ask the reference, or remember what it said; ask the candidate, started unless it runs, until it is clear."""
    asked, judged = _asked(reference, order), [_served(candidate), order.floor.to_data(), order.whole]
    kept = _place("evaluations", [asked, judged])
    if kept.is_file() and not order.again:
        progress("the same was judged before")
        return documents.of(Evaluation, kept)
    engine_s: dict[str, float] = {}
    notes = await _notes(reference, order, _place("references", [asked]), engine_s, progress)
    seen, stopped = Progression(), False
    progress("ask the candidate")
    async with contextlib.nullcontext(running) if running else local.launch(candidate) as replica:
        at_once, context = _room(candidate)
        began = time.monotonic()
        async with EngineClient(replica, await replica.model_name(), at_once=at_once) as asker:
            await _same_tokens(asker, notes)
            for batch in _batches(notes, order, context):
                await batch.ask(asker, seen)
                figures = _figures(order, notes, seen)
                verdict, reason = gate.verdict(order.floor, figures)
                progress(f"{len(seen.texts)} texts, {sum(map(len, seen.spoiled.values()))} answers: {verdict}")
                clear = verdict == "fail" or (verdict == "pass" and seen.spoiled.keys() >= notes.kinds)
                if clear and not order.whole:
                    stopped = not batch.last
                    break
        engine_s["candidate"] = round(time.monotonic() - began, 1)
    found = Evaluation(
        name=candidate.deployment.served_name,
        reference=reference.deployment.served_name,
        candidate=candidate.deployment.served_name,
        floor=order.floor,
        figures=tuple(figures),
        level=LEVEL,
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
    runs.write_atomic(kept, found.to_json())
    return found


async def consult(reference: Prepared, order: EvaluateSpec, *, progress: Progress = lambda _: None) -> None:
    """Ask the reference now, unless what it said is kept: beside a candidate that runs it would be in the way."""
    await _notes(reference, order, _place("references", [_asked(reference, order)]), {}, progress)


def _served(prepared: Prepared) -> dict[str, Any]:
    """Return what tells this deployment from others."""
    return {
        "deployment": prepared.deployment.to_data(),
        "weights": model_files.digest(prepared.deployment.variant.source),
        "version": prepared.installation.version,
    }


def _asked(reference: Prepared, order: EvaluateSpec) -> dict[str, Any]:
    """Return what tells the questions, and who answered them first, from others."""
    tasks = {name: exam.digest for name, exam in order.tasks.items()}
    return {**_served(reference), "probes": order.probes.digest, "tasks": tasks, "top": TOP}


def _place(folder: str, told: list[Any]) -> Path:
    """Return where the answer to the same lies, if it was asked before."""
    key = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return runs.state_root() / folder / f"{key}.json"


async def _notes(
    reference: Prepared, order: EvaluateSpec, path: Path, engine_s: dict[str, float], progress: Progress
) -> ReferenceAnswers:
    """Return what the reference said of these probes; it is asked once."""
    if path.is_file():
        return ReferenceAnswers.read(path)
    progress("start the reference")
    at_once, context = _room(reference)
    async with local.launch(reference) as replica:
        began = time.monotonic()
        async with EngineClient(replica, await replica.model_name(), at_once=at_once) as asker:
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


async def _same_tokens(asker: EngineClient, notes: ReferenceAnswers) -> None:
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
    tasks: Mapping[str, tuple[Task, int, int]]  # and which of its questions
    last: bool

    async def ask(self, asker: EngineClient, seen: Progression) -> None:
        """Ask the candidate, and note how it compares."""
        engine, model = asker.engine, asker.model
        talks = [engine.score(model, one.tokens, places(one.tokens), top=TOP) for one in self.reads]
        for read, spots in zip(self.reads, await asker.hold_all(talks), strict=True):
            seen.texts.append(fidelity.compare(read.kind, read.spots, spots))
        prompts = await asker.hold_all(engine.render(model, one.messages) for one in self.chats)
        replies = await asker.hold_all(engine.answer(model, prompt, most=MOST, top=1) for prompt in prompts)
        for chat, answer in zip(self.chats, replies, strict=True):
            self._note(chat, answer, seen)
        for name, (exam, begin, end) in self.tasks.items():
            seen.scores.setdefault(name, []).extend(await exam.sit(asker, begin, end))

    def _note(self, chat: Answered, answer: Answer, seen: Progression) -> None:
        spoiled = fidelity.diverged(chat.answer.tokens, chat.answer.places, answer.tokens)
        seen.spoiled.setdefault(chat.kind, []).append(spoiled)
        if spoiled:
            question = chat.messages[-1]["content"]
            seen.pairs.append(
                Pair(kind=chat.kind, question=question[-600:], reference=chat.answer.text, candidate=answer.text)
            )


def _batches(notes: ReferenceAnswers, order: EvaluateSpec, context: int) -> Iterator[Batch]:
    """Yield what the reference was asked, some of everything at a time, as far as the candidate has room for it."""
    chats = [one for one in notes.answered if one.room < context]
    for before, share in pairwise((0.0, *LOOKS)):

        def cut(count: int, before: float = before, share: float = share) -> slice:
            return slice(round(before * count), round(share * count))

        parts = {name: (exam, cut(exam.size)) for name, exam in order.tasks.items()}
        yield Batch(
            notes.reads[cut(len(notes.reads))],
            chats[cut(len(chats))],
            {name: (exam, part.start, part.stop) for name, (exam, part) in parts.items()},
            last=share == LOOKS[-1],
        )


def _figures(order: EvaluateSpec, notes: ReferenceAnswers, seen: Progression) -> list[Figure]:
    """Return every figure, of all texts and of each class; the floor bounds those of all texts."""
    bounds, found = order.floor.fidelity, []
    for name in fidelity.FIGURES:
        for kind in ("", *sorted({one.kind for one in seen.texts})):
            texts = [one for one in seen.texts if kind in ("", one.kind)]
            if texts:
                interval = fidelity.interval(texts, name, level=LEVEL)
                found.append(gate.figure(name, kind, interval, len(texts), None if kind else bounds.get(name)))
    parts = {f"spoiled_{kind}": told for kind, told in seen.spoiled.items()}
    for name, told in {"spoiled": list(chain(*parts.values())), **parts}.items():
        assert name in FIDELITY
        found.append(gate.figure(name, "", wilson(sum(told), len(told), z=z_of(LEVEL)), len(told), bounds.get(name)))
    for name, scores in seen.scores.items():
        floor = order.floor.tasks.get(name)
        interval = questions.recovery(notes.tasks[name][: len(scores)], scores, level=LEVEL)
        found.append(gate.figure(f"{name} recovery", "", interval, len(scores), floor.recovery if floor else None))
    return found
