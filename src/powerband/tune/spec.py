"""What `tune` is asked for, and the rig that tries it on this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from powerband import engines, plan
from powerband.core.model import Model
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import needed
from powerband.core.workload import Workload
from powerband.errors import EngineMissing, InputError
from powerband.evaluate.probes import ROOM
from powerband.evaluate.tasks import Task
from powerband.runtime import devices, installations, model_files
from powerband.tune import speculation
from powerband.tune.search_space import search_space
from powerband.tune.trial_runner import Say, TrialRunner

_OF_THE_BUDGET = 0.1  # may go into one load


@dataclass(frozen=True)
class TuneSpec:
    """What to find the best deployment for."""

    model: str
    workload: Workload
    slo: SLO
    floor: QualityFloor | None = None  # None: whatever the answers are
    tasks: Mapping[str, Task] = field(default_factory=dict)
    engines: tuple[str, ...] = ()  # none: every one that is installed and can load the model
    schemes: tuple[str, ...] = ()
    budget_s: float = 7200.0
    most_trials: int | None = None
    requests: int | None = None  # at each load, at the least
    usd_per_h: float | None = None
    seed: int = 0
    base: Path | None = None  # of the workload's own paths
    cluster: str = ""  # of Ray, whose nodes try as well; none: this machine alone


def runner_of(
    order: TuneSpec, folder: Path, *, stopping: threading.Event | None = None, say: Say = lambda _: None
) -> TrialRunner:
    """Return what tries settings on this machine."""
    if order.requests is not None and order.requests < (least := needed(order.slo.highest)):
        raise InputError(
            f"{order.requests} requests cannot tell the p{order.slo.highest * 100:g} that the SLO bounds",
            hint=f"give --requests {least} or more, or leave it away",
        )
    host, needs_weights = devices.this_host(), not order.engines or engines.get(order.engines[0]).reads_weights
    model = model_files.inspect(order.model) if needs_weights else Model(source=order.model)
    longest = plan.draw(order.workload, model, base=order.base).lengths.longest
    own = search_space(
        model,
        host,
        context=max(longest, ROOM if order.floor else 0),  # the gate's long texts must fit too
        wanted=_engines(order, model),
        schemes=order.schemes,
        drafts=speculation.telling(order.workload),
    )
    return TrialRunner(
        model=model,
        workload=order.workload,
        slo=order.slo,
        floor=order.floor,
        levers=own,
        folder=folder,
        usd_per_h=order.usd_per_h or plan.this_machine(host)[0].price.usd_per_h,
        base=order.base,
        requests=order.requests,
        longest_s=_OF_THE_BUDGET * order.budget_s,
        tasks=dict(order.tasks),
        stopping=stopping or threading.Event(),
        say=say,
    )


def _engines(order: TuneSpec, model: Model) -> list[str]:
    """Return the engines to try: those that were named, or that are here and can load the model or a variant of it."""
    if order.engines:
        return list(order.engines)
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
            "no engine that can load the model is on this machine", hint="run 'powerband engine install llamacpp'"
        )
    return found
