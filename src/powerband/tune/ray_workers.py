"""Trials on other machines: one Ray actor on every node, each of which tries settings as this machine would.

The nodes must be alike, and hold Powerband, the engines and the model at the same paths as this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerband.core.statistics import Interval
from powerband.core.study import Settings, Trial
from powerband.errors import InputError
from powerband.runtime import ray_cluster
from powerband.tune.search_space import SearchSpace
from powerband.tune.spec import TuneSpec, runner_of
from powerband.tune.trial_runner import Attempt, TrialRunner


class TrialWorker:
    """The actor."""

    def __init__(self, order: TuneSpec, folder: Path, levers: SearchSpace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rig = runner_of(order, folder)
        self._rig.levers = levers  # as the study left them when it had measured drafts

    async def attempt(
        self, number: int, settings: Settings, expected: Interval | None, best: Trial | None
    ) -> tuple[Trial, str]:
        """Try settings here; return what became of it, and what was measured."""
        trial = await self._rig.attempt(number, settings, expected=expected, best=best)
        self._rig.remember(trial)
        path = self._rig.folder / trial.evidence / "measurement.json"
        return trial, path.read_text() if path.exists() else ""


@contextlib.contextmanager
def workers(order: TuneSpec, rig: TrialRunner) -> Iterator[list[Attempt]]:
    """Yield one way to try settings for each node of the cluster."""
    ray = ray_cluster.connect(order.cluster)
    near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]
    if not nodes:
        raise InputError("the cluster has no node with a CPU", hint="look at 'ray status'")
    kind = ray.remote(TrialWorker)
    actors = [
        kind.options(num_cpus=1, scheduling_strategy=near(node, soft=False)).remote(
            order, rig.folder.resolve(), rig.levers
        )
        for node in nodes
    ]
    try:
        yield [_attempt(ray, actor, rig.folder) for actor in actors]
    finally:
        for actor in actors:
            ray.kill(actor)


def _attempt(ray: Any, actor: Any, folder: Path) -> Attempt:
    async def attempt(
        number: int, settings: Settings, *, expected: Interval | None, best: Trial | None
    ) -> Trial | None:
        try:
            trial, measured = await actor.attempt.remote(number, settings, expected, best)
        except ray.exceptions.RayError:  # the node is gone
            return None
        if measured:
            path = folder / trial.evidence / "measurement.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(measured)
        found: Trial = trial
        return found

    return attempt
