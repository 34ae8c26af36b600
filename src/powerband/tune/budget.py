"""How long the parts of a study take, and what a budget can find.

Durations come from the plan's predicted rates and from the starts of earlier studies on this machine; once the study
has trials, from these.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from powerband import engines
from powerband.core.study import ENGINE, Settings, Trial, best, rate_of
from powerband.core.units import about_duration
from powerband.errors import InputError
from powerband.store import runs

ROUNDS, MAX_ROUNDS = 3, 9  # of a validation
SEARCH_SHARE = 0.5  # of the budget at most; the rest is for validation, its further rounds and the ablation
_MIN_WARMUP_S, _MAX_WARMUP_S, _WARMUP_REQUESTS = 1.0, 15.0, 8  # of a level
_MIN_WINDOW_S = 3.0
_DECIDED_SHARE = 0.6  # of a level's requests that the sequential test needs, on average
_SCREEN_REQUESTS = 25  # in both levels, as if they came at the max rate
_LEVEL_OVERHEAD_S = 1.5  # until the engine is idle, and for the analysis
_CLIMB_LEVELS = 2.6
_CONFIRMATIONS = 1.3  # levels of two full blocks, on average
REFERENCE_S, CHECK_S = 45.0, 45.0  # of the quality check: a guess
UNCALIBRATED = 0.25  # share of the rates that a plan without calibration predicts, as CPUs of ADR 10 showed
_LOOKS = 1  # beyond the defaults, for a study to be worth its time
_UNKNOWN_RATE, _MIN_RATE = 50.0, 0.02
_LOAD_BYTES_PER_S = 2e9  # from a local SSD


Earlier = Mapping[str, Mapping[str, float]]  # what earlier studies took, by engine


@dataclass
class Durations:
    """Predicted durations of the parts of a study, in seconds."""

    requests: int = 50  # at each level
    starts_s: dict[str, float] = field(default_factory=dict)  # of each engine
    best_per_s: float = _UNKNOWN_RATE  # highest rate that is known or expected: candidates that climb are near it
    default_per_s: float = _UNKNOWN_RATE  # highest rate of an engine's defaults
    gate_s: float = 0.0  # reference and quality check
    configurations: int = 1
    side_by_side: int = 1  # trials that run at the same time, if each uses the fewest devices
    fewest_devices: int = 1
    devices: int = 1  # of the best configuration
    leader: str = ""  # its engine

    def learn(self, trials: Sequence[Trial], defaults: Sequence[Settings]) -> None:
        """Replace predictions by what the trials took."""
        if self.gate_s and any(one.quality for one in trials):  # the reference has answered
            self.gate_s = CHECK_S
        for one in trials:
            self.starts_s[one.settings[ENGINE]] = one.start_s or self.starts_s.get(one.settings[ENGINE], 0.0)
        self.best_per_s = max(map(rate_of, trials), default=0.0) or self.best_per_s
        if leader := best(trials):
            self.devices, self.leader = leader.devices, leader.settings[ENGINE]
        tried = [rate for one in trials if one.settings in defaults and (rate := rate_of(one))]
        self.default_per_s = max(tried, default=min(self.default_per_s, self.best_per_s))

    @property
    def start_s(self) -> float:
        """Return the mean time that an engine needs to start."""
        return statistics.fmean(self.starts_s.values() or [0.0])

    def level(self, rate_per_s: float, *, share: float = _DECIDED_SHARE) -> float:
        """Return the duration of a level that needs a share of its requests."""
        rate_per_s = max(_MIN_RATE, rate_per_s)
        warmup_s = min(_MAX_WARMUP_S, max(_MIN_WARMUP_S, _WARMUP_REQUESTS / rate_per_s))
        return _LEVEL_OVERHEAD_S + warmup_s + share * max(_MIN_WINDOW_S, self.requests / rate_per_s)

    def screen(self) -> float:
        """Return the duration of a start and the two levels of a screen."""
        return self.start_s + 2 * _LEVEL_OVERHEAD_S + _SCREEN_REQUESTS / max(_MIN_RATE, self.best_per_s)

    def climb(self, rate_per_s: float | None = None) -> float:
        """Return the duration of a climb, without a start."""
        return _CLIMB_LEVELS * self.level(rate_per_s or self.best_per_s)

    def validation(self, *, finalists: int = 1, rounds: int = ROUNDS) -> float:
        """Return the duration of the interleaved rounds, with the best default, and of the confirmed rate."""
        start_s = self.starts_s.get(self.leader, self.start_s)
        round_s = finalists * (start_s + self.climb()) + start_s + self.climb(self.default_per_s)
        climbs = finalists + 1
        rounds_s = self.waves(rounds * climbs) * round_s / climbs
        return rounds_s + start_s + _CONFIRMATIONS * 2 * self.level(self.best_per_s, share=1.0)

    def waves(self, climbs: int) -> int:
        """Return how many climbs there are one after the other, if as many as fit run at the same time."""
        return math.ceil(climbs / max(1, self.side_by_side * self.fewest_devices // self.devices))

    def least(self) -> float:
        """Return the shortest budget that looks beyond the defaults and leaves time for the validation."""
        looks = min(len(self.starts_s) + _LOOKS, self.configurations)
        return looks * self.screen() + self.start_s + self.climb() + self.gate_s + self.validation()

    def search_ends(self, budget_s: float) -> float:
        """Return when the search has to end so that the validation fits."""
        return min(SEARCH_SHARE * budget_s, budget_s - self.validation() - self.gate_s)

    def looks(self, budget_s: float, max_trials: int | None = None) -> int:
        """Return about how many configurations the search can look at."""
        spare_s = self.search_ends(budget_s) - self.start_s - self.climb()
        most = min(self.configurations, max_trials or self.configurations)
        return max(1, min(most, round(self.side_by_side * spare_s / self.screen())))

    def whole(self, budget_s: float, max_trials: int | None = None) -> float:
        """Return the expected duration of the study: the budget, unless the search space is small."""
        screens_s = self.looks(budget_s, max_trials) * self.screen() / self.side_by_side
        search_s = screens_s + self.start_s + self.climb() + self.gate_s
        return min(budget_s, search_s + self.validation(rounds=MAX_ROUNDS) + self.validation(finalists=2))


def start_s(engine: str, weight_bytes: int | None, *, devices: int = 1) -> float:
    """Return how long an engine starts, if no earlier start on the machine is known; devices load side by side."""
    return engines.get(engine).typical_start_s + (weight_bytes or 0) / devices / _LOAD_BYTES_PER_S


def check(durations: Durations, budget_s: float) -> None:
    """Raise if a budget cannot give more than the engines' defaults."""
    least_s = durations.least()
    if budget_s < 0.9 * least_s:  # a prediction that is a little too long must not refuse
        engines = " and ".join(durations.starts_s)
        raise InputError(
            f"a budget of {about_duration(budget_s)} is too short: the defaults of {engines}, one more configuration "
            f"and the validation take about {about_duration(least_s)}",
            hint=f"give --budget {max(1, -(-int(least_s) // 60))}min or more",
        )


def first_line(durations: Durations, budget_s: float, max_trials: int | None) -> str:
    """Return what a study can find in its budget, and how long it takes."""
    looks, size = durations.looks(budget_s, max_trials), durations.configurations
    if looks >= size:
        finds = f"looks at all {size} configurations"
    else:
        finds = f"looks at about {looks} of {size} configurations: settings that help on their own, few combinations"
    if durations.side_by_side > 1:
        finds += f", {durations.side_by_side} at a time"
    whole, validation = durations.whole(budget_s, max_trials), durations.validation()
    return f"expected duration {about_duration(whole)}: {finds}; at least {about_duration(validation)} for validation"


def remember(trials: Sequence[Trial]) -> None:
    """Keep the engines' start times, and their rates relative to the plan's predictions, for later studies."""
    known = recall()
    for one in trials:
        if one.start_s:
            entry = known.setdefault(one.settings[ENGINE], {})
            entry["start_s"] = one.start_s
            if (rate := rate_of(one)) and one.expected_per_s and one.expected_per_s.low <= 0:  # the plan's own
                entry["rate_over_plan"] = rate / one.expected_per_s.value
    runs.write_atomic(runs.state_root() / "durations.json", json.dumps(known, indent=1) + "\n")


def recall() -> dict[str, dict[str, float]]:
    """Return what earlier studies on this machine took, by engine."""
    path = runs.state_root() / "durations.json"
    try:
        found: dict[str, dict[str, float]] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
