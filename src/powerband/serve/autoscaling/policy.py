"""The parameters of autoscaling: one replica's measured figures, and the user's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

DEFAULT_ATTAINMENT = 0.96


@dataclass(frozen=True)
class ScalingPolicy:
    """One replica's measured figures, which come from a recipe, and what the user wants."""

    rate_per_s: float  # highest rate that one replica sustains within the SLO
    slots: int  # requests that one replica serves concurrently
    start_s: float  # measured start time of a replica
    min_replicas: int = 1
    max_replicas: int = 100
    attainment: float = DEFAULT_ATTAINMENT  # share of the requests that should be served within the SLO
    queue_timeout_s: float = 1.5  # how long a request may wait for a slot

    @property
    def service_s(self) -> float:
        """Return how long a request occupies a slot, as the measured rate implies."""
        return service_s(self.rate_per_s, self.slots, self.queue_timeout_s, self.attainment)

    @property
    def window_s(self) -> float:
        """Return the shortest history that a forecast uses: two start times, and enough requests to count."""
        return max(15.0, 2.0 * self.start_s)

    @property
    def idle_s(self) -> float:
        """Return how long no request must have come before the last replica is stopped, if none may remain."""
        return max(60.0, 10.0 * self.start_s)


@dataclass(frozen=True)
class Tuning:
    """Constants of the autoscaler, the same for every fleet; `proofs/scaling-held-out` judges such choices."""

    windows: tuple[int, ...] = (1, 2, 4, 8, 16)  # of the forecasts, in multiples of the policy's window
    peak_holds_s: tuple[float, ...] = (15.0, 60.0, 300.0)  # how long a peak of the demand is held
    unseen_peak_s: float = 10.0  # length of the peak that is assumed: one for which the initial size is just enough
    margin: float = 0.02  # by which share another candidate must be cheaper than the one that is followed


@lru_cache(maxsize=256)
def service_s(rate_per_s: float, slots: int, queue_timeout_s: float, attainment: float) -> float:
    """Return the service time with which a queue of `slots` serves a Poisson rate and keeps the attainment.

    It is the inverse of the Erlang C formula: the longest mean service time at which a share `attainment` of the
    requests waits no longer than the timeout.
    """
    low, high = 0.0, slots / rate_per_s
    for _ in range(40):
        middle = (low + high) / 2
        idle_rate_per_s = slots / middle - rate_per_s
        late = _erlang_c(slots, rate_per_s * middle) * math.exp(-idle_rate_per_s * queue_timeout_s)
        low, high = (low, middle) if late > 1 - attainment else (middle, high)
    return low


def _erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that wait at all."""
    if load >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))
