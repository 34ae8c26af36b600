"""Automatic re-tuning (`observe --auto`): capture changed traffic, tune for it while the fleet is idle, roll out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import powerband.tune as tune
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.observe import Observation, Report, RequestRecord, TaskLoader
from powerband.observe.capture import capture
from powerband.rollout import RolloutResult, rollout
from powerband.store import documents, runs

_POLL_S = 1.0
_MIN_REQUESTS = 100  # since the drift began: fewer are not tuned for


@dataclass(frozen=True)
class RetunePolicy:
    """Limits of automatic re-tuning."""

    budget_s: float  # of one study
    idle_s: float = 60.0  # time without requests after which the fleet counts as idle
    canary_weight: float = 0.1  # share of the requests that the canary gets
    requests: int = 100  # that the canary must serve before it is promoted
    timeout_s: float = 86_400.0  # for these requests


def requests_since_drift(observation: Observation) -> list[RequestRecord]:
    """Return the requests since the drift began, or all if there is no drift; nothing while they are too few."""
    began_s = min((one.since_s for one in observation.drifted), default=0.0)
    since = [row for row in observation.records if row["timestamp"] / 1000 >= began_s]
    return since if len(since) >= _MIN_REQUESTS else []


async def retune(
    fleet: Path,
    model: str | None,
    observation: Observation,
    records: Sequence[RequestRecord],
    policy: RetunePolicy,
    *,
    load_tasks: TaskLoader,
    report: Report,
) -> RolloutResult:
    """Tune for captured requests with the recipe's SLO and quality floor, and roll the new recipe out."""
    recipe, study = observation.recipe, runs.new_run("retune", root=fleet)
    workload = documents.read_as(Workload, capture(records, study, name="captured"))
    spec = tune.TuneSpec(
        model=recipe.model,
        workload=workload,
        slo=recipe.promise.slo,
        floor=recipe.promise.quality,
        tasks=load_tasks(recipe),
        engines=tuple({one.settings["engine"]: None for one in recipe.baselines}) or (recipe.deployment["engine"],),
        budget_s=policy.budget_s,
        usd_per_h=recipe.usd_per_h,
        base=study,
    )
    await _tune_while_idle(fleet, spec, study, policy.idle_s, report)
    report("rolling out the new recipe")
    return await rollout(
        fleet,
        study / "recipe.yaml",
        model=model,
        canary_weight=policy.canary_weight,
        requests=policy.requests,
        timeout_s=policy.timeout_s,
        report=report,
    )


async def _tune_while_idle(fleet: Path, spec: tune.TuneSpec, study: Path, idle_s: float, report: Report) -> None:
    """Tune while the fleet is idle; a request interrupts the study, which resumes when the fleet is idle again."""
    while True:
        report(f"waiting until the fleet is idle for {idle_s:g} s")
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < idle_s:
            await asyncio.sleep(_POLL_S)
            if _busy(fleet):
                idle_since = time.monotonic()
        stopping = threading.Event()
        progress = tune.Progress(report=report)
        task = asyncio.create_task(tune.tune(spec, folder=study, stopping=stopping, progress=progress))
        try:
            while not task.done() and not _busy(fleet):
                await asyncio.wait([task], timeout=_POLL_S)
            if task.done():
                task.result()
                return
            report("requests arrived: the study is interrupted")
        finally:
            stopping.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(task, return_exceptions=True)


def _busy(fleet: Path) -> bool:
    """Return whether any request is running or queued."""
    try:
        pools = json.loads((fleet / "status.json").read_text()).get("pools", {})
    except (OSError, ValueError):
        raise InputError(f"no fleet runs in {fleet}", hint="start it again with 'powerband serve'") from None
    return any(pool["depth"] or any(pool["running"].values()) for pool in pools.values())
