"""Choose the next trial: engine defaults and the plan's favourites, then Optuna's proposals, then climbs of the best.

New settings are only screened, which takes seconds. Each screen corrects the predictions of all other settings, and of
Optuna's proposals the one with the highest expected gain is next. When nothing untried promises a gain, or time is
short, the settings with the highest predicted rates climb.

The search is stateless: the next step is a function of the trials so far, so a killed study can resume.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from powerband.core.statistics import UNBOUNDED, Interval
from powerband.core.study import ENGINE, Settings, Trial, best, rate_of
from powerband.errors import InputError
from powerband.tune.search_space import SearchSpace, key
from powerband.tune.surrogate import Surrogate

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_FAVOURITES = 1  # of each engine: chosen by the plan alone, after the defaults
_RESOLUTION = 0.1  # predictions of the plan that differ by less are equal: the one nearest to the defaults is preferred
_MIN_GAIN = 0.03
_FIRST_CLIMB = 4  # screens before the first climb, which shows how far off screens are and gives the study an answer
_FINALISTS = 2  # settings that climb
_MAX_TRIES = 3  # of a trial whose levels were all rejected by guards
_PROPOSALS = 40  # asked of Optuna for each trial
_STARTED = ("feasible", "screened", "slower", "too slow")  # outcomes of deployments that work
_ABLE = ("feasible", "screened")  # outcomes of deployments that could win

Expected = Callable[[Settings], Interval | None]
Devices = Callable[[Settings], int]
Pair = tuple[str, str, str]  # engine, lever, setting


@dataclass(frozen=True)
class Step:
    """One trial to run."""

    number: int
    settings: Settings
    expected: Interval | None  # max rate
    best: Trial | None  # its rate is the one to beat
    climb: bool  # measure the max rate; otherwise only estimate it
    rival_value: float = 0.0  # highest value of the other screens
    before: Trial | None = None  # an earlier trial of these settings: screened, or rejected by guards


def check_extra() -> None:
    """Fail unless the extra `tune` is installed; the import itself takes too long for this."""
    if find_spec("optuna") is None or find_spec("numpy") is None:
        raise InputError("tuning needs Optuna", hint="run: pip install 'powerband[tune]'")


class Search:
    """Choose settings from the plan's predictions and the trials so far."""

    def __init__(
        self,
        space: SearchSpace,
        *,
        expected: Expected = lambda _: None,
        devices: Devices = lambda _: 1,
        seed: int = 0,
        usd_per_h: float = 1.0,
        proposals: int = _PROPOSALS,
    ) -> None:
        check_extra()
        self.space, self.seed, self.usd_per_h, self.devices = space, seed, usd_per_h, devices
        self.proposals = proposals
        self.candidates = list(space)
        self.expected = {key(one): expected(one) for one in self.candidates}
        self._planned = {key(one): self._planned_rate(one) for one in self.candidates}
        self._fitted: tuple[tuple[tuple[int, str, float], ...], Surrogate] | None = None
        self.ranking = sorted(self.candidates, key=lambda one: (-self._rate(one), len(space.non_default(one))))

    def next(self, trials: Sequence[Trial], *, screen: bool = True) -> Step | None:
        """Return the next step, or None if nothing is left that could win.

        Without `screen` there are no new settings beyond the engines' defaults and the plan's favourites.
        """
        if first := self._first_looks(trials):
            return self._step(trials, first)
        able = [one for one in trials if one.outcome in _ABLE]
        if len(able) >= _FIRST_CLIMB and not any(map(_climbed, trials)) and (climbing := self._climbing(trials)):
            return self._again(trials, climbing)
        settings = self._proposal(trials) if screen else None
        disturbed = [one for one in trials if one.outcome == "inconclusive" and one.tries < _MAX_TRIES]
        if disturbed and (trials[-1].outcome != "inconclusive" or settings is None):
            return self._again(trials, disturbed[0])
        if settings:
            return self._step(trials, settings)
        return self._again(trials, climbing) if (climbing := self._climbing(trials)) else None

    def _step(self, trials: Sequence[Trial], settings: Settings) -> Step:
        number = 1 + max((one.number for one in trials), default=0)
        rival = max((self._screened(one) for one in trials if one.outcome in _ABLE), default=0.0)
        if not self.space.non_default(settings):  # other engines are looked at first
            rival = UNBOUNDED
        return Step(number, settings, self.corrected(settings, trials), best(trials), climb=False, rival_value=rival)

    def _again(self, trials: Sequence[Trial], one: Trial) -> Step:
        expected = self.corrected(one.settings, trials)
        return Step(one.number, one.settings, expected, best(trials), climb=True, before=one)

    def finalists(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials with the highest predicted rates; after the first only those that could be better."""
        model = self._model(trials)
        able = sorted((one for one in trials if one.outcome in _ABLE), key=lambda one: -model.log_rate(one.settings))
        first = able[:1]
        if not first:
            return []
        gains = model.gains([one.settings for one in able], first[0].settings)
        rest = [one for one, gain in zip(able, gains, strict=True) if gain >= _MIN_GAIN and one is not first[0]]
        return [*first, *rest][:_FINALISTS]

    def _climbing(self, trials: Sequence[Trial]) -> Trial | None:
        """Return the finalist that climbs next."""
        return next((one for one in self.finalists(trials) if one.outcome == "screened"), None)

    def _eligible(self, trials: Sequence[Trial]) -> Callable[[Settings], bool]:
        tried, works = {key(one.settings) for one in trials}, self._works(trials)
        able = self._planned.keys()  # Optuna also proposes combinations that cannot run
        return lambda settings: key(settings) in able and key(settings) not in tried and works(settings) > 0

    def _first_looks(self, trials: Sequence[Trial]) -> Settings | None:
        """Return an engine's defaults or the plan's favourite for it, if one of them was not tried."""
        eligible = self._eligible(trials)
        for default in self.space.all_defaults.values():
            if eligible(default):
                return default
        found = []
        for engine in self.space.by_engine:
            own = [one for one in trials if one.settings[ENGINE] == engine]
            planned = [one for one in own if self.space.non_default(one.settings)]
            known = {self._rate(one.settings) for one in own}
            able = [one for one in self.ranking if one[ENGINE] == engine and self._rate(one) not in {*known, 0.0}]
            if len(planned) < _FAVOURITES and (able := list(filter(eligible, able))):
                near = [one for one in able if self._rate(one) >= (1 - _RESOLUTION) * self._rate(able[0])]
                found.append(min(near, key=lambda one: len(self.space.non_default(one))))
        return found[0] if found else None

    def _proposal(self, trials: Sequence[Trial]) -> Settings | None:
        """Return the untried settings with the highest expected gain, if it is worth a trial."""
        eligible, works, model = self._eligible(trials), self._works(trials), self._model(trials)
        leaders = self.finalists(trials)
        proposals = [*filter(eligible, self._proposals(trials))]
        for some in (proposals, [*filter(eligible, self.ranking)]):
            if not some:
                continue
            if not leaders:
                return max(some, key=lambda one: model.log_rate(one) + math.log(works(one)))
            gains = model.gains(some, leaders[0].settings)
            gain, number = max((gain * works(some[number]), -number) for number, gain in enumerate(gains))
            if gain >= _MIN_GAIN:
                return some[-number]
        return None

    def remaining(self, trials: Sequence[Trial]) -> list[tuple[Settings, Interval]]:
        """Return the untried settings and their corrected predictions, the most promising first."""
        eligible = self._eligible(trials)
        found = [(one, rate) for one in self.candidates if eligible(one) and (rate := self.corrected(one, trials))]
        return sorted(found, key=lambda pair: -pair[1].value)

    def expectation(self, settings: Settings) -> Interval | None:
        """Return the max rate the plan predicts for settings."""
        return self.expected[key(settings)]

    def _rate(self, settings: Settings) -> float:
        """Return the predicted rate of one device."""
        return self._planned[key(settings)]

    def _planned_rate(self, settings: Settings) -> float:
        """Return the predicted rate of one device, rounded to the two digits that mean something."""
        found = self.expectation(settings)
        return float(f"{found.value / self.devices(settings):.2g}") if found else 0.0

    def corrected(self, settings: Settings, trials: Sequence[Trial]) -> Interval | None:
        """Return the plan's prediction, corrected by the trials so far; with trials of its engine it has bounds."""
        if not any(one.value and one.settings[ENGINE] == settings[ENGINE] for one in trials):
            return self.expectation(settings)
        devices, rate = self.devices(settings), self._model(trials).rate(settings)
        return Interval(devices * rate.value, devices * rate.low, min(devices * rate.high, UNBOUNDED))

    def _model(self, trials: Sequence[Trial]) -> Surrogate:
        """Fit the predictions to the trials that showed a rate."""
        known = [(one, self._rate_shown(one)) for one in trials if one.value]
        token = tuple((one.number, one.outcome, rate) for one, rate in known)
        if self._fitted is None or self._fitted[0] != token:
            rates = [(one, math.log(rate)) for one, rate in known]
            self._fitted = token, Surrogate(self.candidates, self._rate, rates)
        return self._fitted[1]

    def _rate_shown(self, trial: Trial) -> float:
        """Return the rate of one device that a trial showed; of one that missed the SLO, what it may sustain."""
        missed = trial.outcome in ("slower", "too slow")
        return (not missed and rate_of(trial) / trial.devices) or trial.value * self.usd_per_h / 3600

    def _screened(self, trial: Trial) -> float:
        """Return the value that a screen showed, which compares with other screens, else the measured value."""
        rate = trial.estimate_per_s.value / trial.devices if trial.estimate_per_s else self._rate_shown(trial)
        return rate * 3600 / self.usd_per_h

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
        for _ in range(self.proposals):
            proposal = study.ask()
            engine = proposal.suggest_categorical(ENGINE, list(self.space.by_engine))
            settings = {ENGINE: engine}
            for lever in self.space.by_engine[engine]:
                settings[lever.name] = proposal.suggest_categorical(f"{engine} {lever.name}", list(lever.settings))
            yield settings

    def _works(self, trials: Sequence[Trial]) -> Callable[[Settings], float]:
        """Return the probability that settings start and keep the quality floor, from the failures so far.

        Suspects of a failed trial are its settings that never worked; of one below the floor, its non-default quality
        settings that passed no quality check. Failures that share suspects are assumed to have one cause.
        """
        fine = {pair for one in trials if one.outcome in _STARTED for pair in _pairs(one.settings)}
        refused = [one.settings for one in trials if one.outcome == "below the floor"]
        started = fine.union(*map(_pairs, refused))
        suspects = [_pairs(one.settings) - started for one in trials if one.outcome == "failed"]
        passed = {pair for one in trials if one.passed for pair in _pairs(one.settings)}
        quality = [self.space.non_default(self.space.quality_settings(one)) | {ENGINE: one[ENGINE]} for one in refused]
        suspects += [_pairs(one) - passed for one in quality]
        causes: list[set[Pair]] = []
        for found in sorted(filter(None, suspects), key=len):
            if shared := next((one for one in causes if one & found), None):
                shared &= found
            else:
                causes.append(set(found))
        return lambda settings: math.prod(1 - len(one & _pairs(settings)) / len(one) for one in causes)

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


def _climbed(trial: Trial) -> bool:
    return trial.outcome in ("feasible", "slower") or (trial.outcome == "too slow" and trial.estimate_per_s is not None)


def _pairs(settings: Settings) -> set[Pair]:
    return {(settings[ENGINE], name, setting) for name, setting in settings.items() if name != ENGINE}


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
