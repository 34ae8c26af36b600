"""Which settings to try next: the engines as they come, what the plan puts first, then the best of Optuna's proposals.

The best is what the plan expects, corrected by what was found: each setting of a lever has a factor of its own, learned
from the trials that had it, and believed as far as they are many.

The search has no memory of its own: it is a function of the trials so far, so a killed study goes on where it was.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from powerband.core.statistics import Interval
from powerband.core.study import Settings, Trial
from powerband.errors import InputError
from powerband.tune.search_space import ENGINE, SearchSpace, key

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_SEEDS = 1  # of the plan's ranking, before anybody's advice
_ASKS = 40  # for proposals
_DOUBT = 1.0  # trials that a factor must outweigh
_CURIOUS = 0.1  # how much more a setting may bring that was hardly tried, as a logarithm
_FITS = 20  # rounds in which the factors are fitted to each other
_FAILURES = 3  # after so many, and no success, a setting is held to be broken

Expected = Callable[[Settings], Interval | None]


class Search:
    """Advice, from what was expected and what was found."""

    def __init__(self, levers: SearchSpace, *, expected: Expected = lambda _: None, seed: int = 0) -> None:
        self.levers, self.seed = levers, seed
        self.everything = list(levers)
        self.expected = {key(one): expected(one) for one in self.everything}
        self.ranking = sorted(self.everything, key=lambda one: (-self._rate(one), len(levers.turned(one))))

    def next(self, trials: Sequence[Trial]) -> Settings | None:
        """Return settings that were not tried and may work; None where there are none."""
        tried = {key(one.settings) for one in trials}
        broken = self._broken(trials)

        def fresh(settings: Settings) -> bool:
            return key(settings) not in tried and not broken.intersection(_pairs(settings))

        for engine in self.levers.by_engine:
            if fresh(default := self.levers.defaults(engine)):
                return default
        started = sum(one.outcome != "ruled out" for one in trials)
        if started < len(self.levers.by_engine) + _SEEDS and (seed := self._seed(trials, fresh)):
            return seed
        able = list(filter(fresh, self._proposals(trials))) or list(filter(fresh, self.ranking))
        return max(able, key=self._belief(trials), default=None)

    def expectation(self, settings: Settings) -> Interval | None:
        """Return what the plan expects of settings."""
        return self.expected[key(settings)]

    def _rate(self, settings: Settings) -> float:
        """Return the expected rate, as exactly as anybody can tell."""
        found = self.expectation(settings)
        return float(f"{found.value:.2g}") if found else 0.0

    def _seed(self, trials: Sequence[Trial], fresh: Callable[[Settings], bool]) -> Settings | None:
        """Return what the plan expects most of, unlike what was tried: the plan cannot tell twins apart."""
        known = {self._rate(one.settings) for one in trials}
        return next((one for one in self.ranking if self._rate(one) not in {*known, 0.0} and fresh(one)), None)

    def _proposals(self, trials: Sequence[Trial]) -> Iterator[Settings]:
        """Ask Optuna, which is told what was found."""
        optuna = _optuna()
        with warnings.catch_warnings():  # that these two are experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                multivariate=True, group=True, n_startup_trials=5, seed=self.seed * 10_007 + len(trials)
            )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for one in trials:
            study.add_trial(self._told(one.settings, one.value))
        for _ in range(_ASKS):
            asked = study.ask()
            engine = asked.suggest_categorical(ENGINE, list(self.levers.by_engine))
            settings = {ENGINE: engine}
            for lever in self.levers.by_engine[engine]:
                settings[lever.name] = asked.suggest_categorical(f"{engine} {lever.name}", list(lever.settings))
            yield settings

    def _belief(self, trials: Sequence[Trial]) -> Callable[[Settings], float]:
        """Return how much to expect of settings: the logarithm of the plan's figure, and what the trials add to it."""
        found = [
            (self._held(one.settings), math.log(one.value) - self._prior(one.settings)) for one in trials if one.value
        ]
        counts = Counter(pair for held, _ in found for pair in held)
        usual = statistics.fmean(gap for _, gap in found) if found else 0.0
        factors = dict.fromkeys(counts, 0.0)
        for _ in range(_FITS):
            for pair in factors:
                left = [
                    gap - usual - sum(factors[other] for other in held if other != pair)
                    for held, gap in found
                    if pair in held
                ]
                factors[pair] = sum(left) / (len(left) + _DOUBT)

        def belief(settings: Settings) -> float:
            held = self._held(settings)
            unknown = math.sqrt(sum(1 / (counts[pair] + 1) for pair in held))
            return self._prior(settings) + sum(factors.get(pair, 0.0) for pair in held) + _CURIOUS * unknown

        return belief

    def _held(self, settings: Settings) -> set[tuple[str, str, str]]:
        """Return what a factor can belong to: each setting on its engine, and the engine itself."""
        return {*_pairs(settings), (settings[ENGINE], "", "")}

    def _prior(self, settings: Settings) -> float:
        return math.log(self._rate(settings) or 1.0)

    def _broken(self, trials: Sequence[Trial]) -> set[tuple[str, str, str]]:
        """Return settings that never worked, and either were alone to blame for a failure or were in several.

        Of an answer below the floor only what changes answers can be to blame, and was not let pass by the whole gate.
        """
        fine = {pair for one in trials if one.outcome in ("feasible", "too slow") for pair in _pairs(one.settings)}
        refused = [one.settings for one in trials if one.outcome == "below the floor"]
        started = fine.union(*map(_pairs, refused))
        suspects = [_pairs(one.settings) - started for one in trials if one.outcome == "failed"]
        passed = {pair for one in trials if one.passed for pair in _pairs(one.settings)}
        spoiling = [self.levers.turned(self.levers.answering(one)) | {ENGINE: one[ENGINE]} for one in refused]
        suspects += [_pairs(one) - passed for one in spoiling]
        often = Counter(pair for found in suspects for pair in found)
        alone = {pair for found in suspects if len(found) == 1 for pair in found}
        return alone | {pair for pair, times in often.items() if times >= _FAILURES}

    def _told(self, settings: Settings, value: float) -> FrozenTrial:
        optuna = _optuna()
        engine = settings[ENGINE]
        choices: dict[str, Any] = {ENGINE: list(self.levers.by_engine)}
        parameters: dict[str, Any] = {ENGINE: engine}
        for lever in self.levers.by_engine[engine]:
            choices[f"{engine} {lever.name}"] = list(lever.settings)
            parameters[f"{engine} {lever.name}"] = settings[lever.name]
        distributions = {name: optuna.distributions.CategoricalDistribution(held) for name, held in choices.items()}
        told: FrozenTrial = optuna.trial.create_trial(params=parameters, distributions=distributions, value=value)
        return told


def _pairs(settings: Settings) -> set[tuple[str, str, str]]:
    return {(settings[ENGINE], name, setting) for name, setting in settings.items() if name != ENGINE}


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("tuning needs Optuna", hint="run: pip install 'powerband[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
