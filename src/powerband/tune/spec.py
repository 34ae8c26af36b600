"""The inputs of `tune`, and the trial runner built from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import powerband.plan as plan
from powerband import engines
from powerband.bench.level_controller import LevelStatus
from powerband.core.engine import Installation
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import min_samples
from powerband.core.workload import Workload
from powerband.errors import EngineMissing, InputError
from powerband.evaluate.probes import MIN_CONTEXT_TOKENS
from powerband.evaluate.tasks import Task
from powerband.load import prompts
from powerband.runtime import devices, hub, installations, model_files
from powerband.tune import runnable, speculation
from powerband.tune.load_runner import Report
from powerband.tune.search_space import search_space
from powerband.tune.trial_runner import TrialRunner

_LEVEL_BUDGET = 0.2  # share of the budget that one load level may take


@dataclass(frozen=True)
class TuneSpec:
    """What to tune for, and within which limits."""

    model: str
    workload: Workload
    slo: SLO
    floor: QualityFloor | None = None  # None: quality is not checked
    tasks: Mapping[str, Task] = field(default_factory=dict)
    engines: tuple[str, ...] = ()  # empty: every installed engine that can load the model
    schemes: tuple[str, ...] = ()  # empty: every scheme that the engine can load
    budget_s: float = 7200.0
    max_trials: int | None = None
    requests: int | None = None  # minimum at each load level
    usd_per_h: float | None = None
    seed: int = 0
    base: Path | None = None  # folder that the workload's paths are relative to
    cluster: str = ""  # address of the Ray cluster that runs the trials; empty: this machine


def make_runner(
    spec: TuneSpec,
    folder: Path,
    *,
    stopping: threading.Event | None = None,
    report: Report = lambda _: None,
    on_status: Callable[[LevelStatus], None] = lambda _: None,
) -> TrialRunner:
    """Return the runner of trials on this machine."""
    host, needs_weights = devices.this_host(), not spec.engines or engines.get(spec.engines[0]).reads_weights
    model = model_files.inspect(hub.local(spec.model, report=report)) if needs_weights else Model(source=spec.model)
    return TrialRunner(
        **shared_fields(spec, model, host, wanted=_engines(spec, model), find=installations.find),
        folder=folder,
        base=spec.base,
        tasks=dict(spec.tasks),
        stopping=stopping or threading.Event(),
        report=report,
        on_status=on_status,
    )


def shared_fields(
    spec: TuneSpec, model: Model, host: Host, *, wanted: Sequence[str], find: Callable[[str], Installation]
) -> dict[str, Any]:
    """Return the fields of a runner of trials that a rehearsal has as well."""
    highest = spec.slo.highest_percentile
    if spec.requests is not None and spec.requests < (min_requests := min_samples(highest)):
        raise InputError(
            f"p{highest * 100:g} of the SLO needs at least {min_requests} requests; --requests is {spec.requests}",
            hint=f"give --requests {min_requests} or more, or omit it",
        )
    requests = plan.sample_requests(spec.workload, model, base=spec.base)
    longest = requests.lengths.max_tokens
    space = search_space(
        model,
        host,
        context=max(longest, MIN_CONTEXT_TOKENS if spec.floor else 0),  # the quality check's long probes must fit too
        wanted=wanted,
        schemes=spec.schemes,
        drafts=speculation.measurable(spec.workload),
    )
    return {
        "model": model,
        "workload": spec.workload,
        "slo": spec.slo,
        "floor": spec.floor,
        "space": runnable.narrowed(space, model, host, find=find),
        "host": host,
        "usd_per_h": spec.usd_per_h or plan.this_machine(host)[0].price.usd_per_h,
        "requests": spec.requests,
        "max_level_s": _LEVEL_BUDGET * spec.budget_s,
        "traffic_tokens": prompts.long_tokens(zip(requests.prompts, requests.outputs, strict=True)),
    }


def _engines(spec: TuneSpec, model: Model) -> list[str]:
    """Return the engines of the spec, or else the installed ones that can load the model or a variant of it."""
    if spec.engines:
        return list(spec.engines)
    found = []
    for name in ("vllm", "llamacpp"):
        can_load = model.format in engines.get(name).formats or model.format == "safetensors"
        try:
            installations.find(name)
        except EngineMissing:
            continue
        found += [name] if can_load else []
    if not found:
        raise EngineMissing(
            f"no installed engine can load {model.source}", hint="run 'powerband engine install llamacpp'"
        )
    return found
