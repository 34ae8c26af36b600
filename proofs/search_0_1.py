"""Choose the next settings to try: engine defaults, then the plan's first choice, then the best of Optuna's proposals.

Proposals are ranked by a score: the plan's prediction, corrected by one factor for each setting of a lever. A factor is
fitted to the trials with that setting and shrunk towards 1 while they are few.

The search is stateless: the next settings are a function of the trials so far, so a killed study can resume.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from powerband.core.statistics import Interval
from powerband.core.study import ENGINE, Settings, Trial
from powerband.errors import InputError
from powerband.tune.search_space import SearchSpace, key

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_PLANNED_TRIALS = 1  # chosen by the plan alone, after the defaults
_PROPOSALS = 40  # asked of Optuna for each trial
_SHRINKAGE = 1.0  # pseudo-trials that pull a factor towards 1
_EXPLORATION = 0.1  # bonus for settings with few trials, in units of a log rate
_FIT_ROUNDS = 20  # of the coordinate descent that fits the factors
_MAX_FAILURES = 3  # a setting without success is excluded after this many

Expected = Callable[[Settings], Interval | None]
Pair = tuple[str, str, str]  # engine, lever, setting


class Search:
    """Choose settings from the plan's predictions and the trials so far."""

    def __init__(self, space: SearchSpace, *, expected: Expected = lambda _: None, seed: int = 0) -> None:
        self.space, self.seed = space, seed
        self.candidates = list(space)
        self.expected = {key(one): expected(one) for one in self.candidates}
        self.ranking = sorted(self.candidates, key=lambda one: (-self._rate(one), len(space.non_default(one))))

    def next(self, trials: Sequence[Trial]) -> Settings | None:
        """Return untried settings that are not excluded; None if there are none."""
        tried = {key(one.settings) for one in trials}
        excluded = self._excluded(trials)

        def eligible(settings: Settings) -> bool:
            return key(settings) not in tried and not excluded.intersection(_pairs(settings))

        for engine in self.space.by_engine:
            if eligible(default := self.space.defaults(engine)):
                return default
        started = sum(one.outcome != "ruled out" for one in trials)
        if started < len(self.space.by_engine) + _PLANNED_TRIALS and (planned := self._planned(trials, eligible)):
            return planned
        able = list(filter(eligible, self._proposals(trials))) or list(filter(eligible, self.ranking))
        return max(able, key=self._score(trials), default=None)

    def expectation(self, settings: Settings) -> Interval | None:
        """Return the max rate the plan predicts for settings."""
        return self.expected[key(settings)]

    def _rate(self, settings: Settings) -> float:
        """Return the predicted rate, rounded to the two digits that mean something."""
        found = self.expectation(settings)
        return float(f"{found.value:.2g}") if found else 0.0

    def _planned(self, trials: Sequence[Trial], eligible: Callable[[Settings], bool]) -> Settings | None:
        """Return the eligible settings with the highest predicted rate, skipping rates equal to those of past trials.

        Equal predictions mean that the plan cannot tell the two apart.
        """
        known = {self._rate(one.settings) for one in trials}
        return next((one for one in self.ranking if self._rate(one) not in {*known, 0.0} and eligible(one)), None)

    def _proposals(self, trials: Sequence[Trial]) -> Iterator[Settings]:
        """Yield proposals of Optuna's TPE sampler, given the trials so far."""
        optuna = _optuna()
        with warnings.catch_warnings():  # multivariate and group are experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                multivariate=True, group=True, n_startup_trials=5, seed=self.seed * 10_007 + len(trials)
            )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for one in trials:
            study.add_trial(self._optuna_trial(one.settings, one.value))
        for _ in range(_PROPOSALS):
            proposal = study.ask()
            engine = proposal.suggest_categorical(ENGINE, list(self.space.by_engine))
            settings = {ENGINE: engine}
            for lever in self.space.by_engine[engine]:
                settings[lever.name] = proposal.suggest_categorical(f"{engine} {lever.name}", list(lever.settings))
            yield settings

    def _score(self, trials: Sequence[Trial]) -> Callable[[Settings], float]:
        """Return the score of settings: log of the predicted rate, plus the fitted factors, plus exploration."""
        found = [
            (self._factors(one.settings), math.log(one.value) - self._log_rate(one.settings))
            for one in trials
            if one.value
        ]
        counts = Counter(factor for names, _ in found for factor in names)
        mean_gap = statistics.fmean(gap for _, gap in found) if found else 0.0
        fitted = dict.fromkeys(counts, 0.0)
        for _ in range(_FIT_ROUNDS):
            for factor in fitted:
                residuals = [
                    gap - mean_gap - sum(fitted[other] for other in names if other != factor)
                    for names, gap in found
                    if factor in names
                ]
                fitted[factor] = sum(residuals) / (len(residuals) + _SHRINKAGE)

        def score(settings: Settings) -> float:
            names = self._factors(settings)
            uncertainty = math.sqrt(sum(1 / (counts[factor] + 1) for factor in names))
            return self._log_rate(settings) + sum(fitted.get(one, 0.0) for one in names) + _EXPLORATION * uncertainty

        return score

    def _factors(self, settings: Settings) -> set[Pair]:
        """Return what has a factor: each setting on its engine, and the engine itself."""
        return {*_pairs(settings), (settings[ENGINE], "", "")}

    def _log_rate(self, settings: Settings) -> float:
        return math.log(self._rate(settings) or 1.0)

    def _excluded(self, trials: Sequence[Trial]) -> set[Pair]:
        """Return settings that never worked and are the only suspect of a failure, or a suspect of several.

        Suspects of a trial below the floor are its non-default quality settings that passed no full quality check.
        """
        fine = {pair for one in trials if one.outcome in ("feasible", "too slow") for pair in _pairs(one.settings)}
        refused = [one.settings for one in trials if one.outcome == "below the floor"]
        started = fine.union(*map(_pairs, refused))
        suspects = [_pairs(one.settings) - started for one in trials if one.outcome == "failed"]
        passed = {pair for one in trials if one.passed for pair in _pairs(one.settings)}
        quality = [self.space.non_default(self.space.quality_settings(one)) | {ENGINE: one[ENGINE]} for one in refused]
        suspects += [_pairs(one) - passed for one in quality]
        counts = Counter(pair for found in suspects for pair in found)
        alone = {pair for found in suspects if len(found) == 1 for pair in found}
        return alone | {pair for pair, count in counts.items() if count >= _MAX_FAILURES}

    def _optuna_trial(self, settings: Settings, value: float) -> FrozenTrial:
        optuna = _optuna()
        engine = settings[ENGINE]
        choices: dict[str, Any] = {ENGINE: list(self.space.by_engine)}
        parameters: dict[str, Any] = {ENGINE: engine}
        for lever in self.space.by_engine[engine]:
            choices[f"{engine} {lever.name}"] = list(lever.settings)
            parameters[f"{engine} {lever.name}"] = settings[lever.name]
        distributions = {name: optuna.distributions.CategoricalDistribution(one) for name, one in choices.items()}
        trial: FrozenTrial = optuna.trial.create_trial(params=parameters, distributions=distributions, value=value)
        return trial


def _pairs(settings: Settings) -> set[Pair]:
    return {(settings[ENGINE], name, setting) for name, setting in settings.items() if name != ENGINE}


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("tuning needs Optuna", hint="run: pip install 'powerband[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
