"""The stage `evaluate`: compare a served deployment's answers with the reference's, and return a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from powerband._callable import make_callable
from powerband.core.evaluation import Evaluation, Figure, Pair
from powerband.core.quality import FIDELITY, Judgement, QualityFloor
from powerband.core.scoring import Answer
from powerband.core.statistics import wilson, z_of
from powerband.errors import InputError
from powerband.evaluate import gate, keys
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluate.keys import TOP_LOGPROBS
from powerband.evaluate.probes import (
    DEPTH,
    LATE,
    MAX_ANSWER_TOKENS,
    NO_PROBES,
    AnsweredChat,
    Probes,
    ScoredText,
    scored_positions,
)
from powerband.evaluate.reference_cache import ReferenceAnswers, collect_reference_answers, history_tokens
from powerband.evaluate.tasks import Task
from powerband.evaluators import fidelity, questions
from powerband.evaluators.fidelity import TextComparison
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime.replica import Replica
from powerband.store import documents, evidence, runs, schemes

CHECKPOINTS = (0.125, 0.25, 0.5, 1.0)  # fractions of all probes after which the verdict is checked
RESERVE_CHECKPOINTS = (0.25, 0.5, 1.0)  # the same of the reserve, which is used only if the verdict is undecided
CONFIDENCE = 1 - 0.05 / (len(CHECKPOINTS) + len(RESERVE_CHECKPOINTS))  # Bonferroni
_MAX_WORST_PAIRS = 12
_KEPT_HISTORY = 0.8  # of the reference's tokens of earlier turns: templates differ a little
Progress = Callable[[str], None]


@dataclass(frozen=True)
class EvaluateSpec:
    """The quality floor, and the probes and tasks that measure it; the reserve is asked if the verdict is undecided."""

    floor: QualityFloor
    probes: Probes
    reserve: Probes = NO_PROBES
    reserve_s: float = 900.0  # engine time of each side for the reserve: it is cut to what fits
    tasks: Mapping[str, Task] = field(default_factory=dict)
    share: float = 1.0  # of the probes and questions; with less the verdict can stay undecided
    run_all: bool = False  # run every probe, even after the verdict is clear
    ignore_cache: bool = False  # do not reuse a cached evaluation
    checkpoints: tuple[float, ...] = CHECKPOINTS

    def of_reserve(self, spent_s: float) -> EvaluateSpec | None:
        """Return the part of the reserve that fits into its time if the rest took `spent_s`; None: no part fits."""
        tasks = {name: further for name, task in self.tasks.items() if (further := task.further)}
        rest = replace(self, probes=self.reserve, reserve=NO_PROBES, tasks=tasks, checkpoints=RESERVE_CHECKPOINTS)
        expected_s = spent_s * rest.size / max(1, self.size)
        shares = [one for one in RESERVE_CHECKPOINTS if one * expected_s <= self.reserve_s]
        return replace(rest, share=max(shares)) if shares and rest.size else None

    @property
    def size(self) -> int:
        """Return the number of probes and questions."""
        questions = sum(task.size for task in self.tasks.values())
        return len(self.probes.texts) + len(self.probes.chats) + questions


@dataclass
class CandidateResults:
    """What the probes found about the candidate so far."""

    comparisons: list[TextComparison] = field(default_factory=list)
    diverged: dict[str, list[bool]] = field(default_factory=dict)  # by kind of chat, for each answer
    scores: dict[str, list[float]] = field(default_factory=dict)  # by task, for each question
    pairs: list[Pair] = field(default_factory=list)  # answers that diverged

    @property
    def text_kinds(self) -> set[str]:
        """Return the kinds of the texts that were scored."""
        return {one.kind for one in self.comparisons}


async def evaluate(
    reference: Prepared,
    candidate: Prepared,
    spec: EvaluateSpec,
    *,
    running: Replica | None = None,
    progress: Progress = lambda _: None,
) -> Evaluation:
    """Evaluate the candidate until the verdict is clear, or return the cached evaluation of the same inputs.

    The candidate is launched unless `running` is a replica of it.
    """
    reference_key = await asyncio.to_thread(keys.reference_key, reference, spec.probes, spec.tasks)
    reserve_key = [spec.reserve.digest, spec.reserve_s]  # a larger reserve may decide what a smaller one did not
    candidate_key = [
        await asyncio.to_thread(keys.deployment_key, candidate),
        spec.floor.to_data(),
        spec.run_all,
        reserve_key,
    ]
    cached = keys.cache_path(evidence.EVALUATIONS, [reference_key, candidate_key])
    if cached.is_file() and not spec.ignore_cache:
        progress("use the cached evaluation")
        return documents.read_as(Evaluation, cached)
    engine_s = dict.fromkeys(("reference", "candidate"), 0.0)
    answers = await _reference_answers(reference, spec, engine_s, progress)
    session = CandidateSession(candidate, running, engine_s, progress)
    figures, verdict, reason = await session.query(spec, answers, answers)
    rest = spec.of_reserve(max(engine_s.values()))
    if verdict == "undecided" and rest and not running and spec.share >= 1:
        progress(f"undecided: {reason}; up to {rest.size} further probes and questions follow")
        more = await _reference_answers(reference, rest, engine_s, progress)
        figures, verdict, reason = await session.query(rest, more, answers + more)
    found = Evaluation(
        name=candidate.deployment.served_name,
        reference=reference.deployment.served_name,
        candidate=candidate.deployment.served_name,
        floor=spec.floor,
        figures=tuple(figures),
        level=CONFIDENCE,
        verdict=verdict,
        reason=reason,
        worst=tuple(session.results.pairs[:_MAX_WORST_PAIRS]),
        stopped_early=session.stopped,
        engine_s={side: round(seconds, 1) for side, seconds in engine_s.items() if seconds},
        provenance={
            "reference": reference.deployment.to_data(),
            "candidate": candidate.deployment.to_data(),
            "probes": spec.probes.digest,
            "engines": {one.engine.name: one.installation.version for one in (reference, candidate)},
            evidence.RECORD: _record(reference, candidate),
        },
    )
    if spec.share >= 1 or verdict != "undecided":  # the whole evaluation would end at the same checkpoint
        runs.write_atomic(cached, found.to_json())
    return found


@dataclass
class CandidateSession:
    """A candidate and its results so far; the reserve may need a second launch."""

    candidate: Prepared
    running: Replica | None
    engine_s: dict[str, float]
    progress: Progress
    results: CandidateResults = field(default_factory=CandidateResults)
    stopped: bool = False  # before the last probe, because the verdict was clear

    async def query(
        self, spec: EvaluateSpec, answers: ReferenceAnswers, known: ReferenceAnswers
    ) -> tuple[list[Figure], Judgement, str]:
        """Query the candidate until the verdict is clear; return the figures, the verdict and its reason.

        `known` has the reference's answers to all that the candidate was asked, also before.
        """
        results, figures = self.results, list[Figure]()
        verdict: Judgement = "undecided"
        reason = ""
        self.progress("query the candidate")
        launched = contextlib.nullcontext(self.running) if self.running else local.launch(self.candidate)
        async with launched as replica:
            concurrency, context = _limits(self.candidate)
            began = time.monotonic()
            async with EngineClient(replica, await replica.model_name(), concurrency=concurrency) as client:
                await _check_same_tokenizer(client, known)
                lost = await _lost_history(client, known)
                for batch in _batches(answers, spec, context):
                    await batch.run(client, results)
                    figures = _figures(spec, known, results)
                    verdict, reason = ("fail", lost) if lost else gate.verdict(spec.floor, figures)
                    answer_count = sum(map(len, results.diverged.values()))
                    self.progress(f"{len(results.comparisons)} texts, {answer_count} answers: {verdict}")
                    complete = results.diverged.keys() >= known.chat_kinds and results.text_kinds >= known.text_kinds
                    clear = verdict == "fail" or (verdict == "pass" and complete)
                    if clear and not spec.run_all:
                        self.stopped = not batch.last
                        break
            self.engine_s["candidate"] += time.monotonic() - began
        return figures, verdict, reason


def _record(reference: Prepared, candidate: Prepared) -> dict[str, Any] | None:
    """Return what identifies this evaluation as evidence for plans; None if the catalogue does not know the scheme."""
    shape, settings = candidate.model.shape, candidate.engine.settings_of
    try:
        scheme = schemes.published_scheme(candidate.model).name
    except InputError:
        return None
    if shape is None:
        return None
    kv_format = settings(candidate.deployment, model=candidate.model, host=candidate.host).kv_format
    return {
        "model": reference.model.name,
        "parameters": shape.parameters / 1e9,
        "experts": bool(shape.experts),
        "scheme": "" if scheme in evidence.LOSSLESS else scheme,
        "kv_format": "" if kv_format in evidence.LOSSLESS else kv_format,
        "engine": candidate.engine.name,
        "engine_version": candidate.installation.version,
    }


async def ensure_reference_answers(
    reference: Prepared, spec: EvaluateSpec, *, progress: Progress = lambda _: None
) -> None:
    """Cache the reference's answers before a candidate starts, so that the two do not compete for the machine."""
    await _reference_answers(reference, spec, {}, progress)


async def _reference_answers(
    reference: Prepared, spec: EvaluateSpec, engine_s: dict[str, float], progress: Progress
) -> ReferenceAnswers:
    """Return the reference's answers from the cache; launch the reference and query it for those that are not there."""
    key = await asyncio.to_thread(keys.reference_key, reference, spec.probes, spec.tasks)
    path, part = keys.cache_path("references", [key]), keys.cache_path("references", [key, spec.share])
    if path.is_file():
        return ReferenceAnswers.read(path).first(spec.share)
    if spec.share < 1 and part.is_file():
        return ReferenceAnswers.read(part)
    earlier = next(
        (
            (share, one)
            for share in CHECKPOINTS
            if share < spec.share and (one := keys.cache_path("references", [key, share])).is_file()
        ),
        None,
    )
    progress("start the reference")
    concurrency, context = _limits(reference)
    async with local.launch(reference) as replica:
        began = time.monotonic()
        async with EngineClient(replica, await replica.model_name(), concurrency=concurrency) as client:
            progress("query the reference; its answers are cached")
            begin = earlier[0] if earlier else 0.0
            answers = await collect_reference_answers(
                client, spec.probes, spec.tasks, top=TOP_LOGPROBS, context=context, begin=begin, end=spec.share
            )
        engine_s["reference"] = engine_s.get("reference", 0.0) + time.monotonic() - began
    answers = ReferenceAnswers.read(earlier[1]) + answers if earlier else answers
    answers.write(path if spec.share >= 1 else part)
    return answers


def _limits(prepared: Prepared) -> tuple[int, int]:
    """Return how many exchanges may run concurrently, and the context of each in tokens."""
    if prepared.engine.scheduling is None:
        raise InputError(
            f"engine '{prepared.engine.name}' does not return token log-probabilities, which an evaluation needs",
            hint="evaluate a vllm or llamacpp deployment",
        )
    settings = prepared.engine.settings_of(prepared.deployment, model=prepared.model, host=prepared.host)
    return min(4, settings.sequences), settings.context


async def _check_same_tokenizer(client: EngineClient, answers: ReferenceAnswers) -> None:
    """Raise if the candidate tokenizes text differently from the reference: their distributions cannot be compared."""
    for text, tokens in answers.tokenizer_samples:
        if list(tokens) != await client.run(client.engine.tokenize(client.model, text)):
            raise InputError(
                "the reference and the candidate tokenize the same text differently",
                hint="give a candidate that is a variant of the reference's model",
            )


async def _lost_history(client: EngineClient, answers: ReferenceAnswers) -> str:
    """Return what the chat template loses of earlier turns, compared with the reference's; empty: nothing."""
    kept = await history_tokens(client)
    if kept >= _KEPT_HISTORY * answers.history_tokens:
        return ""
    return (
        f"the chat template drops earlier turns: a chat with two turns is {kept} tokens longer than its last turn, "
        f"with the reference's template {answers.history_tokens}"
    )


@dataclass(frozen=True)
class Batch:
    """The part of the probes and tasks that runs before one checkpoint."""

    texts: Sequence[ScoredText]
    chats: Sequence[AnsweredChat]
    tasks: Mapping[str, tuple[Task, int, int]]  # with the range of questions
    last: bool

    async def run(self, client: EngineClient, results: CandidateResults) -> None:
        """Query the candidate, compare its answers with the reference's, and add the outcome to the results."""
        engine, model = client.engine, client.model
        scorings = await client.run_all(
            engine.score(model, one.tokens, scored_positions(one.tokens, one.kind), top=TOP_LOGPROBS)
            for one in self.texts
        )
        for text, distributions in zip(self.texts, scorings, strict=True):
            results.comparisons.append(fidelity.compare(text.kind, text.distributions, distributions))
        prompts = await client.run_all(engine.render(model, one.messages) for one in self.chats)
        replies = await client.run_all(
            engine.answer(model, prompt, max_tokens=MAX_ANSWER_TOKENS, top=1) for prompt in prompts
        )
        for chat, answer in zip(self.chats, replies, strict=True):
            self._add_answer(chat, answer, results)
        for name, (task, begin, end) in self.tasks.items():
            results.scores.setdefault(name, []).extend(await task.run(client, begin, end))

    def _add_answer(self, chat: AnsweredChat, answer: Answer, results: CandidateResults) -> None:
        diverged = fidelity.diverged(chat.answer.tokens, chat.answer.distributions, answer.tokens)
        results.diverged.setdefault(chat.kind, []).append(diverged)
        if diverged:
            question = chat.messages[-1]["content"]
            results.pairs.append(
                Pair(kind=chat.kind, question=question[-600:], reference=chat.answer.text, candidate=answer.text)
            )


def _batches(answers: ReferenceAnswers, spec: EvaluateSpec, context: int) -> Iterator[Batch]:
    """Yield one batch for each checkpoint, without the chats that exceed the candidate's context."""
    chats = [one for one in answers.chats if one.context_tokens < context]
    shares = [one / spec.share for one in spec.checkpoints if one <= spec.share] or [1.0]
    for before, share in pairwise((0.0, *shares)):

        def cut(count: int, before: float = before, share: float = share) -> slice:
            return slice(round(before * count), round(share * count))

        parts = {name: (task, cut(round(spec.share * task.size))) for name, task in spec.tasks.items()}
        yield Batch(
            [one for one in answers.texts[cut(len(answers.texts))] if len(one.tokens) < context],
            chats[cut(len(chats))],
            {name: (task, part.start, part.stop) for name, (task, part) in parts.items()},
            last=share == shares[-1],
        )


def _figures(spec: EvaluateSpec, answers: ReferenceAnswers, results: CandidateResults) -> list[Figure]:
    """Return every figure, over all texts and for each class; only figures over all texts have a bound."""
    bounds, found = spec.floor.fidelity, []
    late = [one for one in results.comparisons if one.kind == LATE]
    if late:
        interval = fidelity.interval(late, "kl_mean", level=CONFIDENCE)
        found.append(gate.figure("kl_late", "", interval, len(late), bounds.get("kl_late")))
    usual = [one for one in results.comparisons if one.kind != LATE]
    for name in fidelity.FIGURES:
        for kind in ("", *sorted({one.kind for one in usual})):
            texts = [one for one in usual if kind in ("", one.kind)]
            if texts:
                interval = fidelity.interval(texts, name, level=CONFIDENCE)
                found.append(gate.figure(name, kind, interval, len(texts), None if kind else bounds.get(name)))
    by_kind = {f"diverged_{kind}": diverged for kind, diverged in results.diverged.items()}
    usual_chats = [one for kind, diverged in results.diverged.items() if kind != DEPTH for one in diverged]
    for name, diverged in {"diverged": usual_chats, **by_kind}.items():
        if not diverged:
            continue
        assert name in FIDELITY
        interval = wilson(sum(diverged), len(diverged), z=z_of(CONFIDENCE))
        found.append(gate.figure(name, "", interval, len(diverged), bounds.get(name)))
    for name, scores in results.scores.items():
        floor = spec.floor.tasks.get(name)
        interval = questions.recovery(answers.task_scores[name][: len(scores)], scores, level=CONFIDENCE)
        found.append(gate.figure(f"{name} recovery", "", interval, len(scores), floor.recovery if floor else None))
    return found


make_callable(__name__)
