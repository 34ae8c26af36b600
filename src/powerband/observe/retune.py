"""`observe --auto`: traffic that left its recipe's region is captured, tuned for while nobody asks, and rolled out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerband import tune
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.observe import Exams, Note, Observation, Say
from powerband.observe.capture import capture
from powerband.rollout import Verdict, rollout
from powerband.store import documents, runs

_LOOK_S = 1.0
_ENOUGH = 100  # requests since the drift began, before they are tuned for


@dataclass(frozen=True)
class RetunePolicy:
    """How it may act."""

    budget_s: float  # of the study
    idle_s: float = 60.0  # without a request, before the machine is taken for idle
    share: float = 0.1  # of the requests that the new recipe gets on trial
    requests: int = 100  # that it must answer no worse
    timeout_s: float = 86_400.0  # until these have come


def enough(found: Observation) -> list[Note]:
    """Return the requests since the traffic changed, or all where it is late only; nothing as long as they are few."""
    began_s = min((one.since_s for one in found.drifted), default=0.0)
    since = [row for row in found.held if row["timestamp"] / 1000 >= began_s]
    return since if len(since) >= _ENOUGH else []


async def retune(
    fleet: Path,
    model: str | None,
    found: Observation,
    since: Sequence[Note],
    terms: RetunePolicy,
    *,
    exams: Exams,
    say: Say,
) -> Verdict:
    """Tune for the traffic as it is now, and roll the answer out."""
    recipe, study = found.recipe, runs.new_run("retune", root=fleet)
    workload = documents.of(Workload, capture(since, study, name="captured"))
    order = tune.TuneSpec(
        model=recipe.model,
        workload=workload,
        slo=recipe.promise.slo,
        floor=recipe.promise.quality,
        tasks=exams(recipe),
        engines=tuple({one.settings["engine"]: None for one in recipe.baselines}) or (recipe.deployment["engine"],),
        budget_s=terms.budget_s,
        usd_per_h=recipe.usd_per_h,
        base=study,
    )
    await _while_idle(fleet, order, study, terms.idle_s, say)
    say("roll the new recipe out")
    return await rollout(
        fleet,
        study / "recipe.yaml",
        model=model,
        share=terms.share,
        requests=terms.requests,
        timeout_s=terms.timeout_s,
        say=say,
    )


async def _while_idle(fleet: Path, order: tune.TuneSpec, study: Path, idle_s: float, say: Say) -> None:
    """Tune while nobody asks the fleet anything; whoever asks interrupts the study, which goes on later."""
    while True:
        say("wait until nobody asks")
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < idle_s:
            await asyncio.sleep(_LOOK_S)
            if _busy(fleet):
                quiet_since = time.monotonic()
        stopping = threading.Event()
        listener = tune.Progress(say=say)
        task = asyncio.create_task(tune.tune(order, folder=study, stopping=stopping, listener=listener))
        try:
            while not task.done() and not _busy(fleet):
                await asyncio.wait([task], timeout=_LOOK_S)
            if task.done():
                task.result()
                return
            say("somebody asks: the study waits")
        finally:
            stopping.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(task, return_exceptions=True)


def _busy(fleet: Path) -> bool:
    """Tell whether anybody is being answered, or waits."""
    try:
        pools = json.loads((fleet / "status.json").read_text()).get("pools", {})
    except (OSError, ValueError):
        raise InputError(f"no fleet runs in {fleet}", hint="start it again with 'powerband serve'") from None
    return any(pool["depth"] or any(pool["running"].values()) for pool in pools.values())
