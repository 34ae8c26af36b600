"""Build the recipe: the pinned deployment, its validated rate and traffic, and the hashes of the evidence."""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import powerband
from powerband.core.measurement import Level
from powerband.core.recipe import BaselineComparison, Promised, Range, Recipe
from powerband.core.statistics import quantile
from powerband.core.study import Settings, Study
from powerband.core.workload import Workload
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.load import prompts, tokens
from powerband.load.prompts import Traffic
from powerband.runtime import model_files
from powerband.tune.search_space import WEIGHTS
from powerband.tune.trial_runner import TrialRunner

_PORT = 8000  # in the command that the recipe shows
_SAMPLED_REQUESTS = 400  # that describe the traffic
_EVIDENCE = ("study.json", "trials.jsonl", "speculation.jsonl", "validation.jsonl", "ablation.jsonl")


@dataclass(frozen=True)
class ConfirmedRate:
    """A rate that met the SLO on held-out requests, and its measurement."""

    prepared: Prepared
    rate_per_s: float
    level: Level
    memory_bytes: int | None


def build_recipe(
    runner: TrialRunner,
    study: Study,
    confirmed: ConfirmedRate,
    *,
    settings: Settings,
    summary: str,
    baselines: tuple[BaselineComparison, ...],
    ablation: tuple[BaselineComparison, ...],
) -> Recipe:
    """Return the recipe."""
    prepared, rate, level = confirmed.prepared, confirmed.rate_per_s, confirmed.level
    assert level.attainment is not None
    traffic = [
        prompts.prepare(
            runner.workload.with_seed(seed).at_rate(rate),
            _SAMPLED_REQUESTS,
            vocabulary=tokens.vocabulary(model_files.location(runner.model.source)),
            base=runner.base,
        )
        for seed in level.seeds
    ]
    per_request = statistics.fmean(prompt + output for one in traffic for _, prompt, output in one.requests())
    command = prepared.command(_PORT)
    return Recipe(
        name=study.name,
        summary=summary,
        model=model_files.absolute_source(runner.model.source),
        model_digest=model_files.digest(runner.model.source),
        scheme=settings.get(WEIGHTS, ""),
        weights_digest=model_files.digest(prepared.deployment.variant.full_source),
        engine_version=prepared.installation.version,
        deployment=prepared.deployment.to_data(units=True),
        reference=runner.reference_data(),
        settings=settings,
        promise=Promised(
            slo=runner.slo,
            rate_per_s=rate,
            attainment=level.attainment,
            quality=runner.floor,
            memory_bytes=confirmed.memory_bytes,
            in_flight=round(max(level.timeline.in_flight, default=0)) or None,
            prefix_hit_share=level.engine.get("prefix_hit_share"),
            spec_accepted_share=level.engine.get("spec_accepted_share"),
        ),
        workload=_pinned(runner.workload, runner.base),
        validity=_validity(traffic, rate),
        **replica_devices(prepared),
        usd_per_h=runner.usd_per_h * prepared.devices,
        usd_per_1m_tokens=runner.usd_per_h * prepared.devices / 3600 / rate / per_request * 1e6,
        baselines=baselines,
        ablation=ablation,
        command=local.shell_line(command) if command else "",
        evidence=_evidence(runner.folder),
        provenance={
            "powerband": powerband.__version__,
            "proven_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine_build": prepared.installation.build,
            "machine": prepared.host.described(),
        },
    )


def replica_devices(prepared: Prepared) -> dict[str, Any]:
    """Return the number of GPUs of a replica, and the vendor and name of the devices that it runs on."""
    count, host = prepared.footprint.gpu_ways * prepared.footprint.copies, prepared.host
    need = prepared.need
    able = [gpu for gpu in host.gpus if need.allowed is None or gpu.index in need.allowed] if count else []
    large = [gpu for gpu in able if need.free_bytes <= (need.free_share or 1.0) * gpu.memory_bytes]
    if usable := large or able:
        return {"gpus": count, "device_vendor": usable[0].vendor, "device_name": usable[0].name}
    return {"gpus": count} if count else {"device_name": host.cpu_name}


def _pinned(workload: Workload, base: Path | None) -> Workload:
    """Return the workload with absolute paths, so that the recipe can be moved."""
    files = {name: one for name in ("dataset", "trace") if (one := getattr(workload, name))}
    paths = {
        name: one.model_copy(update={"path": str(((base or Path()) / one.path).resolve())})
        for name, one in files.items()
    }
    return workload.model_copy(update=paths)


def _validity(traffic: list[Traffic], rate: float) -> dict[str, Range]:
    """Return the range of each traffic property during validation."""
    prompt = sorted(tokens for one in traffic for _, tokens, _ in one.requests())
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
    """Return the coefficient of variation of the gaps between arrivals: 0 is constant, 1 is Poisson."""
    gaps = [late - early for early, late in pairwise(due_s)]
    return statistics.pstdev(gaps) / max(statistics.fmean(gaps), 1e-9)


def _evidence(folder: Path) -> dict[str, str]:
    found = [folder / name for name in _EVIDENCE] + sorted(folder.glob("*/measurement.json"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found if path.is_file()
    }
