"""Studies in virtual time on lab hosts: four models on three hosts of eight GPUs, with a known optimum."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lab_world import LabWorld

import powerband.plan as plan
from powerband import inputs, tune
from powerband.core.model import Model
from powerband.core.study import Settings
from powerband.plan.options import host_of
from powerband.runtime import model_files
from powerband.tune import virtual_time
from powerband.tune.predicted_world import Predictions
from powerband.tune.rehearse import installation, played, with_weight_bytes
from powerband.tune.search import Search
from powerband.tune.spec import TuneSpec, shared_fields
from powerband.tune.virtual_runner import VirtualRunner

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen3-30B-A3B")
HOSTS = ("h100-sxm", "h200-sxm", "l40s")
CASES = [(model, host) for model in MODELS for host in HOSTS]
GPUS, BUDGET_S, TRIALS = 8, 4 * 3600.0, 40
SCHEMES = ("bf16", "fp8-dynamic", "w8a8-int8")


@dataclass(frozen=True)
class Ended:
    """A study that ended."""

    winner: Settings | None
    seconds: float
    looked: int


class Case:
    """One model on one host, in a lab drawn by a seed."""

    def __init__(self, number: int, *, seed: int, workload: str = "chat", slo: str = "reading-speed") -> None:
        self.name, self.system, self.seed = *CASES[number], seed + number
        self.workload, self.slo = inputs.workload(workload), inputs.slo(slo)
        self.host = host_of(plan.device(self.system), GPUS)
        self.spec = TuneSpec(
            self.name, self.workload, self.slo, engines=("vllm",), schemes=SCHEMES, budget_s=BUDGET_S,
            max_trials=TRIALS, seed=self.seed,
        )  # fmt: skip
        self.model: Model = with_weight_bytes(model_files.architecture(self.name))
        self.fields: dict[str, Any] = shared_fields(
            self.spec, self.model, self.host, wanted=("vllm",), find=installation
        )
        self.space = self.fields["space"]
        self.requests = plan.sample_requests(self.workload, self.model)
        self.expected = tune.expectations(self.model, self.host, self.space, self.requests, self.slo)
        self.predictions = Predictions(self.model, self.host, self.space, self.expected)

    def world(self) -> LabWorld:
        """Return the lab's world, from its beginning."""
        return LabWorld(self.predictions, self.model, self.requests, system=self.system, seed=self.seed)

    @cached_property
    def truth(self) -> LabWorld:
        """Return the lab's world, to ask what is true."""
        return self.world()

    @cached_property
    def best(self) -> Settings:
        """Return the configuration with the most requests per dollar."""
        return self.truth.best(self.slo, weight=lambda one: 1 / self.truth.devices(one))

    @cached_property
    def priced_as_one(self) -> Settings:
        """Return the configuration that wins if every replica is priced as one device, as version 0.1 did."""
        return self.truth.best(self.slo, weight=lambda _: 1.0)

    def share(self, settings: Settings | None) -> float:
        """Return the requests per dollar of a configuration over those of the best one."""
        return self.rate(settings) / self.rate(self.best) if settings else 0.0

    def rate(self, settings: Settings) -> float:
        """Return the true max rate per device."""
        return self.truth.max_rate(settings, self.slo) / self.truth.devices(settings)

    def study(self, *, side_by_side: bool = True) -> Ended:
        """Run a study in virtual time."""
        with tempfile.TemporaryDirectory(prefix="lab-study-") as folder:
            runner = VirtualRunner(**self.fields, folder=Path(folder), world=self.world(), sampled=self.requests)
            search = Search(
                self.space, expected=self.expected, devices=runner.devices, seed=self.seed,
                usd_per_h=runner.usd_per_h, proposals=8,
            )  # fmt: skip
            runner.durations = tune.durations(self.spec, runner, search, earlier={})
            if not side_by_side:
                runner.durations.side_by_side = 1
            return virtual_time.run(_ended(self.spec, runner, search))


async def _ended(spec: TuneSpec, runner: VirtualRunner, search: Search) -> Ended:
    winner, looked = await played(spec, runner, search)
    return Ended(winner, runner.now(), looked)
