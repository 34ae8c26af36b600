"""A world for studies in virtual time whose step times are those of the lab's engines, not the planner's.

What the measured rows do not tell is drawn by the lab's seed: the effect of each setting, the cost of a step without CUDA
graphs, and the KV cache that is really free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from powerband.core.coefficients import Coefficients
from powerband.core.model import Model
from powerband.core.slo import SLO
from powerband.core.study import Settings
from powerband.plan import predict
from powerband.plan.predict import FluidEstimate, Requests, Server
from powerband.plan.simulate import Limits, Outcome, simulate
from powerband.plan.step_work import Batch
from powerband.store import schemes
from powerband.testing.lab import truth
from powerband.tune.budget import CHECK_S, REFERENCE_S, start_s
from powerband.tune.predicted_world import Predictions
from powerband.tune.search_space import WEIGHTS, Key, key
from powerband.tune.virtual_levels import Answer, Load

PRECISIONS = {"bf16": "bf16", "fp8-dynamic": "fp8", "w8a8-int8": "fp8", "w4a16-awq": "int4", "w4a16-gptq": "int4"}
QUIRK, DRIFT = 0.05, 0.02  # standard deviations of logarithms: of a setting, and from level to level
EAGER_S = (0.001, 0.006)  # of a decode step without CUDA graphs
_NOISE = 1.15  # the open loop's requests come in another order


class LabTimes:
    """Step times of the lab for the planner's simulation."""

    coefficients = Coefficients(engine="vllm")  # the simulation reads the factor on tails, which is 1 here

    def __init__(self, times: truth.StepTimes, factor: float, eager_s: float) -> None:
        self.times, self.factor, self.eager_s = times, factor, eager_s

    def __call__(self, batch: Batch) -> float:
        step_s = self.times.step_s(round(batch.decodes), round(batch.prefill_tokens), batch.decode_context)
        return self.factor * step_s + self.eager_s


class LabWorld:
    """What the deployments of one lab do."""

    def __init__(self, predictions: Predictions, model: Model, requests: Requests, *, system: str, seed: int) -> None:
        self.predictions, self.model, self.requests, self.system, self.seed = (
            predictions, model, requests, system, seed,
        )  # fmt: skip
        self.reference_s, self.check_s = REFERENCE_S, CHECK_S
        self._drift = random.Random(seed)
        self._servers: dict[Key, Server] = {}
        self._rates: dict[Key, float] = {}
        self._closed: dict[Key, FluidEstimate] = {}

    def _drawn(self, what: object) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def devices(self, settings: Settings) -> int:
        """Return the devices of a configuration."""
        return int(self.predictions.devices[self.predictions.number[key(settings)]])

    def start_s(self, settings: Settings) -> float:
        """Return the start time of the engine, which differs from lab to lab."""
        slower = math.exp(self._drawn("start").gauss(0, 0.2))
        return slower * start_s("vllm", self._weight_bytes(settings), devices=self.devices(settings))

    def failure(self, settings: Settings) -> str:
        """Return nothing: what cannot run is not in the search space."""
        return ""

    def keeps_floor(self, settings: Settings) -> bool:
        """Return whether the scheme keeps the quality floor, which the lab draws for schemes of 4 bits."""
        bits = schemes.scheme(settings[WEIGHTS]).linear_bits
        return bits >= 8 or self._drawn(settings[WEIGHTS]).random() < 0.5

    def engine(self, settings: Settings) -> Answer:
        """Return a function that answers the requests of one level."""
        server, slower = self.server(settings), math.exp(self._drift.gauss(0, DRIFT))

        def answer(load: Load) -> Outcome:
            return simulate(
                load.due, load.prompts, load.outputs, lambda batch: slower * server.times(batch), server.limits,
                cached_share=load.cached_share, closed=load.closed,
            )  # fmt: skip

        return answer

    def server(self, settings: Settings) -> Server:
        """Return the simulated replica."""
        if key(settings) not in self._servers:
            space, planned = self.predictions.space, self.predictions.server(settings)
            changed = {lever: one for lever, one in space.non_default(settings).items() if lever != WEIGHTS}
            factor = math.exp(sum(self._drawn(pair).gauss(0, QUIRK) for pair in changed.items()))
            eager_s = self._drawn("eager").uniform(*EAGER_S) if settings.get("cuda_graphs") == "off" else 0.0
            shape = self.model.shape
            assert shape is not None
            times = truth.step_times(
                system=self.system,
                active_bytes=self._weight_bytes(settings) * shape.active_parameters / shape.parameters,
                devices=self.devices(settings),
                precision=PRECISIONS[settings[WEIGHTS]],
                seed=self.seed,
                model=self.model.source,
            )
            limits: Limits = planned.limits
            free = math.exp(self._drawn("memory").gauss(0, QUIRK))
            limits = replace(limits, kv_tokens=free * limits.kv_tokens, request_s=times.request_s)
            self._servers[key(settings)] = Server(LabTimes(times, factor, eager_s), limits)  # type: ignore[arg-type]
        return self._servers[key(settings)]

    def _weight_bytes(self, settings: Settings) -> int:
        assert self.model.shape is not None
        return int(schemes.scheme(settings[WEIGHTS]).weight_bytes(self.model.shape))

    def best(self, slo: SLO, *, weight: Callable[[Settings], float]) -> Settings:
        """Return the configuration with the highest true max rate times a weight.

        No open loop sustains more than the closed loop that fills the engine, so only those are searched for their max
        rate whose closed loop could win.
        """
        able = [one for one in self.predictions.candidates if self.keeps_floor(one)]
        bounds = {key(one): _NOISE * weight(one) * self._closed_loop(one).rate_per_s for one in able}
        found: Settings | None = None
        for one in sorted(able, key=lambda one: -bounds[key(one)]):
            most = weight(found) * self.max_rate(found, slo) if found else 0.0
            if bounds[key(one)] < most:
                break
            if weight(one) * self.max_rate(one, slo) > most:
                found = one
        assert found
        return found

    def max_rate(self, settings: Settings, slo: SLO) -> float:
        """Return the true max rate; 0 below the quality floor."""
        if key(settings) not in self._rates:
            found = None
            if self.keeps_floor(settings):
                estimate = self._closed_loop(settings)
                if estimate.rate_per_s:
                    found = predict.max_rate(self.server(settings), self.requests, slo, estimate=estimate)
            self._rates[key(settings)] = found.rate_per_s if found else 0.0
        return self._rates[key(settings)]

    def _closed_loop(self, settings: Settings) -> FluidEstimate:
        """Return the throughput with as many users as the engine runs at once."""
        if key(settings) not in self._closed:
            server = self.server(settings)
            users = max(
                1.0, min(server.limits.sequences, server.limits.kv_tokens / self.requests.lengths.mean_kv_tokens)
            )
            rate_per_s = predict.capacity(server, self.requests)
            answer_s = users / rate_per_s if rate_per_s else math.inf
            self._closed[key(settings)] = FluidEstimate(rate_per_s, answer_s, 0.0, "")
        return self._closed[key(settings)]
