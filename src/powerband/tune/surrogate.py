"""Predict the max rate per device of settings: the plan's predictions, corrected by a Gaussian process over the trials.

The process models the logarithm of the measured over the predicted rate. Two settings correlate by what they share: the
engine, levers, and pairs of levers. So each trial corrects all predictions of settings that share something with it.
Estimates of a screen have more noise than measured rates, and a bias that all screens share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from powerband.core.statistics import UNBOUNDED, Interval
from powerband.core.study import ENGINE, Settings, Trial
from powerband.tune.search_space import key

# Prior variances of a log rate: errors of the plan that all settings share, or those of one engine, of one lever's
# setting, of one pair of settings, and of one configuration alone.
_PLAN, _ENGINE, LEVER, _PAIR, ALONE = 4.0, 0.25, 0.06, 0.015, 0.03
# Noise of a measured rate, of a screen's estimate, and of a deployment that missed the SLO; the bias of all screens.
_MEASURED, _ESTIMATED, _SLOWER, _MISSED, _BIAS = 0.01, 0.03, 0.03, 0.16, 0.06
QUANTILE = 1.2816  # standard deviations between the mean and the bounds of an 80 % interval


class Surrogate:
    """The distribution of the max rates of all candidates, given the trials so far."""

    def __init__(
        self,
        candidates: Sequence[Settings],
        planned: Callable[[Settings], float],
        trials: Sequence[tuple[Trial, float]],  # with the log of the rate that each showed
    ) -> None:
        import numpy as np

        self._numbers = {key(one): number for number, one in enumerate(candidates)}
        known = [(trial, rate) for trial, rate in trials if key(trial.settings) in self._numbers]
        seen = np.array([self._numbers[key(trial.settings)] for trial, _ in known], dtype=int)
        self._onehot = _one_hot(candidates)
        prior = np.array([math.log(planned(one) or 1.0) for one in candidates])
        self.mean, self._half = prior, np.zeros((0, len(candidates)))
        self.variance = np.array([self._kernel(np.array([row]), np.array([row]))[0, 0] for row in range(len(prior))])
        if known:
            screens = np.array([trial.outcome not in ("feasible", "slower") for trial, _ in known], dtype=float)
            noise = [_noise(trial) for trial, _ in known]
            gram = self._kernel(seen, seen) + np.diag(noise) + _BIAS * np.outer(screens, screens)
            root = np.linalg.cholesky(gram)
            self._half = np.linalg.solve(root, self._kernel(seen, np.arange(len(prior))))
            gaps = np.array([rate for _, rate in known]) - prior[seen]
            self.mean = prior + self._half.T @ np.linalg.solve(root, gaps)
            self.variance = self.variance - (self._half**2).sum(axis=0)

    def _kernel(self, rows: Any, columns: Any) -> Any:
        """Return the prior covariances of candidates."""
        levers = self._onehot[0][rows] @ self._onehot[0][columns].T
        same = self._onehot[1][rows] @ self._onehot[1][columns].T
        alone = rows[:, None] == columns[None, :]
        return _PLAN + _ENGINE * same + LEVER * levers + _PAIR * levers * (levers - 1) / 2 + ALONE * alone

    def rate(self, settings: Settings) -> Interval:
        """Return the prediction of the max rate, with an 80 % interval."""
        row = self._numbers[key(settings)]
        middle, reach = math.exp(self.mean[row]), math.exp(QUANTILE * math.sqrt(max(0.0, self.variance[row])))
        return Interval(middle, middle / reach, min(middle * reach, UNBOUNDED))

    def log_rate(self, settings: Settings) -> float:
        """Return the mean of the log rate."""
        return float(self.mean[self._numbers[key(settings)]])

    def gains(self, settings: Sequence[Settings], over: Settings) -> list[float]:
        """Return the expected improvement of each over one configuration, as a fraction of its rate."""
        import numpy as np

        rows = np.array([self._numbers[key(one)] for one in settings], dtype=int)
        best = self._numbers[key(over)]
        shared = self._kernel(rows, np.array([best]))[:, 0] - self._half[:, rows].T @ self._half[:, best]
        spread = np.sqrt(np.maximum(1e-9, self.variance[rows] + self.variance[best] - 2 * shared))
        score = (self.mean[rows] - self.mean[best]) / spread
        density = np.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in score])
        return [float(one) for one in spread * (score * below + density)]


def _noise(trial: Trial) -> float:
    noise = {"feasible": _MEASURED, "slower": _SLOWER, "too slow": _MISSED}
    return noise.get(trial.outcome, _ESTIMATED)


def _one_hot(candidates: Sequence[Settings]) -> tuple[Any, Any]:
    """Return which settings, and which engine, each candidate has."""
    import numpy as np

    pairs = sorted({(one[ENGINE], *pair) for one in candidates for pair in one.items() if pair[0] != ENGINE})
    names = sorted({one[ENGINE] for one in candidates})
    column = {pair: number for number, pair in enumerate(pairs)}
    levers, engine = np.zeros((len(candidates), len(pairs))), np.zeros((len(candidates), len(names)))
    for row, one in enumerate(candidates):
        engine[row, names.index(one[ENGINE])] = 1.0
        for pair in one.items():
            if pair[0] != ENGINE:
                levers[row, column[one[ENGINE], *pair]] = 1.0
    return levers, engine
