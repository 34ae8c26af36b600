"""What an autoscaler sees of one model: replicas and requests at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FleetSnapshot:
    """Replicas and requests of one model at one moment."""

    at_s: float
    ready: int
    starting: int
    waiting: int
    running: int
    arrived: int  # requests since the start
    rejected: int = 0  # requests since the start for which there was no capacity in time
    late: int = 0  # requests since the start whose first token came after the limit of the SLO
    at_metrics_s: float | None = None  # when the requests were counted, if earlier

    @property
    def metrics_s(self) -> float:
        """Return when the requests were counted."""
        return self.at_s if self.at_metrics_s is None else self.at_metrics_s
