"""Write the recipe: everything pinned, the promise, where it was proven, and the evidence by its hash."""

from __future__ import annotations

import hashlib
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import powerband
from powerband.core.recipe import BaselineComparison, Promised, Range, Recipe
from powerband.core.statistics import quantile
from powerband.core.study import Settings, Study
from powerband.core.workload import Workload
from powerband.launchers import local
from powerband.load import prompts, tokens
from powerband.load.prompts import Traffic
from powerband.runtime import model_files
from powerband.tune.search_space import WEIGHTS
from powerband.tune.trial_runner import TrialRunner

if TYPE_CHECKING:
    from powerband.tune.validation import Proof

_PORT = 8000  # of the command that is shown
_DRAWN = 400  # requests that tell what the traffic was like
_EVIDENCE = ("study.json", "trials.jsonl", "drafts.jsonl", "finals.jsonl", "levers.jsonl")


def written(
    rig: TrialRunner,
    study: Study,
    proof: Proof,
    *,
    settings: Settings,
    summary: str,
    baselines: tuple[BaselineComparison, ...],
    ablation: tuple[BaselineComparison, ...],
) -> Recipe:
    """Return the recipe."""
    prepared, rate, level = proof.prepared, proof.rate_per_s, proof.level
    assert level.attainment is not None
    traffic = [
        prompts.prepare(
            rig.workload.with_seed(seed).at_rate(rate),
            _DRAWN,
            vocabulary=tokens.vocabulary(rig.model.source),
            base=rig.base,
        )
        for seed in level.seeds
    ]
    per_request = statistics.fmean(
        (sum(one.prompt_tokens) + sum(one.output_tokens) / one.turns) / len(one) for one in traffic
    )
    command = prepared.command(_PORT)
    return Recipe(
        name=study.name,
        summary=summary,
        model=model_files.anywhere(rig.model.source),
        model_digest=model_files.digest(rig.model.source),
        scheme=settings.get(WEIGHTS, ""),
        weights_digest=model_files.digest(prepared.deployment.variant.source),
        engine_version=prepared.installation.version,
        deployment=prepared.deployment.to_data(units=True),
        reference=rig.known_reference(),
        settings=settings,
        promise=Promised(
            slo=rig.slo,
            rate_per_s=rate,
            attainment=level.attainment,
            quality=rig.floor,
            memory_bytes=proof.memory_bytes,
            in_flight=round(max(level.timeline.in_flight, default=0)) or None,
            prefix_hit_share=level.engine.get("prefix_hit_share"),
            spec_accepted_share=level.engine.get("spec_accepted_share"),
        ),
        workload=_pinned(rig.workload, rig.base),
        validity=_validity(traffic, rate),
        usd_per_h=rig.usd_per_h,
        usd_per_1m_tokens=rig.usd_per_h / 3600 / rate / per_request * 1e6,
        baselines=baselines,
        ablation=ablation,
        command=local.paste(command) if command else "",
        evidence=_evidence(rig.folder),
        provenance={
            "powerband": powerband.__version__,
            "proven_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine_build": prepared.installation.build,
            "machine": prepared.host.described(),
        },
    )


def _pinned(workload: Workload, base: Path | None) -> Workload:
    """Return the workload with paths that mean the same wherever the recipe lies."""
    held = {name: one for name in ("dataset", "trace") if (one := getattr(workload, name))}
    paths = {
        name: one.model_copy(update={"path": str(((base or Path()) / one.path).resolve())})
        for name, one in held.items()
    }
    return workload.model_copy(update=paths)


def _validity(traffic: list[Traffic], rate: float) -> dict[str, Range]:
    """Return between which values the traffic lay that it was proven with."""
    prompt = sorted(tokens for one in traffic for tokens in one.prompt_tokens)
    output = sorted(tokens for one in traffic for tokens in one.output_tokens)
    shares = [one.prefix_share for one in traffic]
    bursts = [_burstiness(list(one.due_s)) for one in traffic]
    turns = traffic[0].turns
    return {
        "rate_per_s": Range(low=0.0, high=rate),
        "prompt_tokens": Range(low=quantile(prompt, 0.01), high=quantile(prompt, 0.99)),
        "output_tokens": Range(low=quantile(output, 0.01), high=quantile(output, 0.99)),
        "prefix_share": Range(low=min(shares), high=max(shares)),
        "burstiness": Range(low=min(bursts), high=max(bursts)),
        "turns": Range(low=turns, high=turns),
    }


def _burstiness(due_s: list[float]) -> float:
    """Return the coefficient of variation of the gaps between arrivals: 0 is even, 1 is Poisson."""
    gaps = [late - early for early, late in pairwise(due_s)]
    return statistics.pstdev(gaps) / max(statistics.fmean(gaps), 1e-9)


def _evidence(folder: Path) -> dict[str, str]:
    found = [folder / name for name in _EVIDENCE] + sorted(folder.glob("*/measurement.json"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found if path.is_file()
    }
