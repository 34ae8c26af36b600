"""The stage `evaluate`: compare a served deployment's answers with the reference's, and return a verdict."""

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

from powerband._callable import make_callable
from powerband.core.evaluation import Evaluation, Figure, Pair
from powerband.core.quality import FIDELITY, QualityFloor
from powerband.core.scoring import Answer
from powerband.core.statistics import wilson, z_of
from powerband.errors import InputError
from powerband.evaluate import gate
from powerband.evaluate.engine_client import EngineClient
from powerband.evaluate.probes import MAX_ANSWER_TOKENS, AnsweredChat, Probes, ScoredText, scored_positions
from powerband.evaluate.reference_cache import ReferenceAnswers, collect_reference_answers
from powerband.evaluate.tasks import Task
from powerband.evaluators import fidelity, questions
from powerband.evaluators.fidelity import TextComparison
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime import model_files
from powerband.runtime.replica import Replica
from powerband.store import documents, runs

TOP_LOGPROBS = 20  # tokens compared at each position; vLLM's default maximum
CHECKPOINTS = (0.125, 0.25, 0.5, 1.0)  # fractions of all probes after which the verdict is checked
QUESTIONS_PER_TASK = 200  # default maximum
CONFIDENCE = 1 - 0.05 / len(CHECKPOINTS)  # Bonferroni: all checkpoints together err at most as often as one at 95 %
_MAX_WORST_PAIRS = 12
Progress = Callable[[str], None]


@dataclass(frozen=True)
class EvaluateSpec:
    """The quality floor, and the probes and tasks that measure it."""

    floor: QualityFloor
    probes: Probes
    tasks: Mapping[str, Task] = field(default_factory=dict)
    run_all: bool = False  # run every probe, even after the verdict is clear
    ignore_cache: bool = False  # do not reuse a cached evaluation


@dataclass
class CandidateResults:
    """What the probes found about the candidate so far."""

    comparisons: list[TextComparison] = field(default_factory=list)
    diverged: dict[str, list[bool]] = field(default_factory=dict)  # by kind of chat, for each answer
    scores: dict[str, list[float]] = field(default_factory=dict)  # by task, for each question
    pairs: list[Pair] = field(default_factory=list)  # answers that diverged


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
    reference_key = _reference_key(reference, spec)
    candidate_key = [_deployment_key(candidate), spec.floor.to_data(), spec.run_all]
    cached = _cache_path("evaluations", [reference_key, candidate_key])
    if cached.is_file() and not spec.ignore_cache:
        progress("use the cached evaluation")
        return documents.read_as(Evaluation, cached)
    engine_s: dict[str, float] = {}
    path = _cache_path("references", [reference_key])
    answers = await _reference_answers(reference, spec, path, engine_s, progress)
    results, stopped = CandidateResults(), False
    progress("query the candidate")
    async with contextlib.nullcontext(running) if running else local.launch(candidate) as replica:
        concurrency, context = _limits(candidate)
        began = time.monotonic()
        async with EngineClient(replica, await replica.model_name(), concurrency=concurrency) as client:
            await _check_same_tokenizer(client, answers)
            for batch in _batches(answers, spec, context):
                await batch.run(client, results)
                figures = _figures(spec, answers, results)
                verdict, reason = gate.verdict(spec.floor, figures)
                answer_count = sum(map(len, results.diverged.values()))
                progress(f"{len(results.comparisons)} texts, {answer_count} answers: {verdict}")
                clear = verdict == "fail" or (verdict == "pass" and results.diverged.keys() >= answers.chat_kinds)
                if clear and not spec.run_all:
                    stopped = not batch.last
                    break
        engine_s["candidate"] = round(time.monotonic() - began, 1)
    found = Evaluation(
        name=candidate.deployment.served_name,
        reference=reference.deployment.served_name,
        candidate=candidate.deployment.served_name,
        floor=spec.floor,
        figures=tuple(figures),
        level=CONFIDENCE,
        verdict=verdict,
        reason=reason,
        worst=tuple(results.pairs[:_MAX_WORST_PAIRS]),
        stopped_early=stopped,
        engine_s=engine_s,
        provenance={
            "reference": reference.deployment.to_data(),
            "candidate": candidate.deployment.to_data(),
            "probes": spec.probes.digest,
            "engines": {one.engine.name: one.installation.version for one in (reference, candidate)},
        },
    )
    runs.write_atomic(cached, found.to_json())
    return found


async def ensure_reference_answers(
    reference: Prepared, spec: EvaluateSpec, *, progress: Progress = lambda _: None
) -> None:
    """Cache the reference's answers before a candidate starts, so that the two do not compete for the machine."""
    path = _cache_path("references", [_reference_key(reference, spec)])
    await _reference_answers(reference, spec, path, {}, progress)


def _deployment_key(prepared: Prepared) -> dict[str, Any]:
    """Return the part of a cache key that identifies a deployment, its weights and its engine version."""
    return {
        "deployment": prepared.deployment.to_data(),
        "weights": model_files.digest(prepared.deployment.variant.source),
        "version": prepared.installation.version,
    }


def _reference_key(reference: Prepared, spec: EvaluateSpec) -> dict[str, Any]:
    """Return the part of a cache key that identifies the reference, the probes and the tasks."""
    tasks = {name: task.digest for name, task in spec.tasks.items()}
    return {**_deployment_key(reference), "probes": spec.probes.digest, "tasks": tasks, "top": TOP_LOGPROBS}


def _cache_path(folder: str, key: list[Any]) -> Path:
    """Return the cache file for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return runs.state_root() / folder / f"{digest}.json"


async def _reference_answers(
    reference: Prepared, spec: EvaluateSpec, path: Path, engine_s: dict[str, float], progress: Progress
) -> ReferenceAnswers:
    """Return the reference's answers from the cache at `path`; if there are none, launch the reference and query it."""
    if path.is_file():
        return ReferenceAnswers.read(path)
    progress("start the reference")
    concurrency, context = _limits(reference)
    async with local.launch(reference) as replica:
        began = time.monotonic()
        async with EngineClient(replica, await replica.model_name(), concurrency=concurrency) as client:
            progress("query the reference; its answers are cached")
            answers = await collect_reference_answers(
                client, spec.probes, spec.tasks, top=TOP_LOGPROBS, context=context
            )
        engine_s["reference"] = round(time.monotonic() - began, 1)
    answers.write(path)
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
            engine.score(model, one.tokens, scored_positions(one.tokens), top=TOP_LOGPROBS) for one in self.texts
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
    for before, share in pairwise((0.0, *CHECKPOINTS)):

        def cut(count: int, before: float = before, share: float = share) -> slice:
            return slice(round(before * count), round(share * count))

        parts = {name: (task, cut(task.size)) for name, task in spec.tasks.items()}
        yield Batch(
            answers.texts[cut(len(answers.texts))],
            chats[cut(len(chats))],
            {name: (task, part.start, part.stop) for name, (task, part) in parts.items()},
            last=share == CHECKPOINTS[-1],
        )


def _figures(spec: EvaluateSpec, answers: ReferenceAnswers, results: CandidateResults) -> list[Figure]:
    """Return every figure, over all texts and for each class; only figures over all texts have a bound."""
    bounds, found = spec.floor.fidelity, []
    for name in fidelity.FIGURES:
        for kind in ("", *sorted({one.kind for one in results.comparisons})):
            texts = [one for one in results.comparisons if kind in ("", one.kind)]
            if texts:
                interval = fidelity.interval(texts, name, level=CONFIDENCE)
                found.append(gate.figure(name, kind, interval, len(texts), None if kind else bounds.get(name)))
    by_kind = {f"diverged_{kind}": diverged for kind, diverged in results.diverged.items()}
    for name, diverged in {"diverged": list(chain(*by_kind.values())), **by_kind}.items():
        assert name in FIDELITY
        interval = wilson(sum(diverged), len(diverged), z=z_of(CONFIDENCE))
        found.append(gate.figure(name, "", interval, len(diverged), bounds.get(name)))
    for name, scores in results.scores.items():
        floor = spec.floor.tasks.get(name)
        interval = questions.recovery(answers.task_scores[name][: len(scores)], scores, level=CONFIDENCE)
        found.append(gate.figure(f"{name} recovery", "", interval, len(scores), floor.recovery if floor else None))
    return found


make_callable(__name__)
