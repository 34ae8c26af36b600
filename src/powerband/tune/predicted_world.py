"""What a plan predicts of all configurations of a search space, and worlds that differ from it by random errors."""

from __future__ import annotations

import math
from typing import Any

from powerband import engines
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.study import ENGINE, Settings
from powerband.errors import InputError
from powerband.plan import calibrate, expect
from powerband.plan.predict import Server
from powerband.plan.simulate import Outcome, simulate
from powerband.store import schemes
from powerband.tune import runnable, surrogate
from powerband.tune.budget import CHECK_S, REFERENCE_S, start_s
from powerband.tune.search import Expected, Pair
from powerband.tune.search_space import WEIGHTS, Key, SearchSpace, key
from powerband.tune.virtual_levels import Answer, Load

_DRIFT = 0.02  # of the machine from level to level, standard deviation of a logarithm
# Assumed, as nothing is known of this model on these devices: the share of settings that do not start, of schemes with
# 8 bits and with fewer that lose too much quality, and of other settings that change answers.
_FAILING, _DEGRADED_8_BIT, _DEGRADED_4_BIT, _DEGRADED_OTHER = 0.02, 0.05, 0.4, 0.1
ASSUMPTIONS = (
    "the plan's rates are wrong by its own spread, and by a factor of "
    f"{math.exp(math.sqrt(surrogate.LEVER)):.2g} for each setting that is not the default",
    f"{_FAILING:.0%} of the settings do not start",
    f"{_DEGRADED_8_BIT:.0%} of the 8-bit schemes, {_DEGRADED_4_BIT:.0%} of those with fewer bits and "
    f"{_DEGRADED_OTHER:.0%} of other settings that change answers are below the quality floor",
    f"a quality check takes {CHECK_S:.0f} s, weights are built before, and each device reads them at 2 GB/s",
    "trials that run side by side do not slow each other",
)


class Predictions:
    """What the plan predicts of all configurations."""

    def __init__(self, model: Model, host: Host, space: SearchSpace, expected: Expected) -> None:
        import numpy as np

        self.model, self.host, self.space = model, host, space
        self.candidates = list(space)
        self.number = {key(one): number for number, one in enumerate(self.candidates)}
        self.devices = np.array([runnable.devices(space, model, host, one) for one in self.candidates])
        self.rate_per_s = np.array([found.value if (found := expected(one)) else 0.0 for one in self.candidates])
        self.engine = np.unique([one[ENGINE] for one in self.candidates], return_inverse=True)[1]
        changed = [_changed(space, one) for one in self.candidates]
        self.pairs = sorted(set().union(*changed))
        has = np.array([[pair in own for pair in self.pairs] for own in changed], dtype=bool)
        self.has = has.reshape(len(changed), len(self.pairs))
        known = calibrate.saved()
        self._known, self._servers = known, dict[Key, Server]()

    def server(self, settings: Settings) -> Server:
        """Return the simulated replica."""
        if key(settings) not in self._servers:
            scheme = settings[WEIGHTS]
            deployment = engines.deployment_of(self.space.document(settings, self.model.source))
            found = expect.server_for(deployment, model=self.model, host=self.host, known=self._known, scheme=scheme)
            if found is None:
                raise InputError(
                    f"the plan cannot simulate {settings[ENGINE]} with {scheme} weights of {self.model.source}",
                    hint="give other engines with --engine, or other schemes with --scheme",
                )
            self._servers[key(settings)] = found
        return self._servers[key(settings)]

    def spread(self) -> float:
        """Return the error of the plan, as the standard deviation of a log rate."""
        tpot = self.server(self.candidates[0]).times.coefficients.tpot
        return math.log(tpot.high / tpot.low) / (2 * surrogate.QUANTILE)


class PredictedWorld:
    """The plan's predictions with errors: of each engine, of each setting, and of each configuration alone."""

    def __init__(self, predictions: Predictions, seed: int, *, checked: bool) -> None:
        """Draw the errors; without a quality check a configuration may win whatever its answers are."""
        import numpy as np

        self.predictions, self._draw = predictions, np.random.default_rng(seed)
        self.reference_s, self.check_s = REFERENCE_S, CHECK_S
        draw, has = self._draw, predictions.has
        log = draw.normal(0, predictions.spread(), predictions.engine.max() + 1)[predictions.engine]
        log += has @ draw.normal(0, math.sqrt(surrogate.LEVER), has.shape[1])
        log += has.any(axis=1) * draw.normal(0, math.sqrt(surrogate.ALONE), len(has))
        self._speed = np.exp(log)  # true over predicted
        degraded = [_degraded_share(predictions.space, pair) for pair in predictions.pairs]
        self._fails: Any = (has & (draw.random(has.shape[1]) < _FAILING)).any(axis=1)
        self._degraded: Any = (has & (draw.random(has.shape[1]) < degraded)).any(axis=1)
        able = ~(self._fails | self._degraded) if checked else ~self._fails
        self.values = able * predictions.rate_per_s * self._speed / predictions.devices  # per device, about

    def start_s(self, settings: Settings) -> float:
        """Return how long the engine starts and loads the weights."""
        model = runnable.model_in(self.predictions.model, settings[WEIGHTS])
        devices = int(self.predictions.devices[self._number(settings)])
        return start_s(settings[ENGINE], model.weight_bytes, devices=devices)

    def failure(self, settings: Settings) -> str:
        """Return why the engine does not start; empty: it starts."""
        return "it does not start" if self._fails[self._number(settings)] else ""

    def keeps_floor(self, settings: Settings) -> bool:
        """Return whether the answers are within the quality floor."""
        return not self._degraded[self._number(settings)]

    def engine(self, settings: Settings) -> Answer:
        """Return a function that answers the requests of one level."""
        server = self.predictions.server(settings)
        slower = math.exp(self._draw.normal(0, _DRIFT)) / self._speed[self._number(settings)]
        times = server.times.scaled(prefill=slower, decode=slower)

        def answer(load: Load) -> Outcome:
            share, closed = load.cached_share, load.closed
            return simulate(
                load.due, load.prompts, load.outputs, times, server.limits, cached_share=share, closed=closed
            )

        return answer

    def found(self, settings: Settings) -> float:
        """Return the requests per dollar of a configuration over those of the best one."""
        most = self.values.max()
        return float(self.values[self._number(settings)] / most) if most else 0.0

    def _number(self, settings: Settings) -> int:
        return self.predictions.number[key(settings)]


def _changed(space: SearchSpace, settings: Settings) -> set[Pair]:
    return {(settings[ENGINE], lever, one) for lever, one in space.non_default(settings).items() if lever != ENGINE}


def _degraded_share(space: SearchSpace, pair: Pair) -> float:
    """Return the probability that a setting degrades answers too much."""
    engine, name, setting = pair
    if name == WEIGHTS:
        return _DEGRADED_8_BIT if schemes.scheme(setting).linear_bits >= 8 else _DEGRADED_4_BIT
    lever = next(one for one in space.by_engine[engine] if one.name == name)
    return _DEGRADED_OTHER if lever.affects_quality else 0.0
