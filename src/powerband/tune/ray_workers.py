"""Run trials on a Ray cluster: one actor on each node, which runs trials as this machine would.

The nodes need the same hardware, and Powerband, the engines and the model at the same paths as this machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerband.core.study import Trial
from powerband.errors import InputError
from powerband.runtime import ray_cluster
from powerband.tune.search import Step
from powerband.tune.search_space import SearchSpace
from powerband.tune.spec import TuneSpec, make_runner
from powerband.tune.trial_runner import RunTrial, TrialRunner


class TrialWorker:
    """The Ray actor that runs trials on its node."""

    def __init__(self, spec: TuneSpec, folder: Path, space: SearchSpace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._runner = make_runner(spec, folder)
        self._runner.space = space  # reduced by the driver's speculation results

    async def run_trial(self, step: Step) -> tuple[Trial, str]:
        """Run one trial on this node; return it and the text of its measurement."""
        trial = await self._runner.run_trial(step)
        self._runner.remember_quality(trial)
        path = self._runner.folder / trial.evidence / "measurement.json"
        return trial, path.read_text() if path.exists() else ""


@contextlib.contextmanager
def workers(spec: TuneSpec, runner: TrialRunner) -> Iterator[list[RunTrial]]:
    """Yield one function that runs a trial for each node of the cluster."""
    ray = ray_cluster.connect(spec.cluster)
    pin = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")]
    if not nodes:
        raise InputError(f"the Ray cluster {spec.cluster} has no node with a CPU", hint="run 'ray status'")
    actor_type = ray.remote(TrialWorker)
    actors = [
        actor_type.options(num_cpus=1, scheduling_strategy=pin(node, soft=False)).remote(
            spec, runner.folder.resolve(), runner.space
        )
        for node in nodes
    ]
    try:
        yield [_run_on(ray, actor, runner.folder) for actor in actors]
    finally:
        for actor in actors:
            ray.kill(actor)


def _run_on(ray: Any, actor: Any, folder: Path) -> RunTrial:
    async def run_trial(step: Step) -> Trial | None:
        try:
            trial, measurement = await actor.run_trial.remote(step)
        except ray.exceptions.RayError:  # the node is gone
            return None
        if measurement:
            path = folder / trial.evidence / "measurement.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(measurement)
        found: Trial = trial
        return found

    return run_trial
