"""An SLO: upper bounds on latency metrics at percentiles."""

from __future__ import annotations

import itertools
import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from powerband.core.document import Document
from powerband.core.units import Seconds

_PERCENTILE = re.compile(r"^p(\d{1,2}(?:\.\d+)?)$")


def _percentile(key: str) -> str:
    if not (match := _PERCENTILE.match(key)) or not 0 < float(match[1]) < 100:
        raise ValueError(f"'{key}' is not a percentile; write p50, p95 or p99.9")
    return key


Bounds = Annotated[dict[Annotated[str, AfterValidator(_percentile)], Seconds], Field(min_length=1)]


class SLO(Document):
    """Latency bounds that a deployment must meet: each metric stays below its bound at each percentile."""

    kind: ClassVar[str] = "slo"

    ttft: Bounds | None = Field(default=None, description="time to first token, from the scheduled send time")
    itl: Bounds | None = Field(default=None, description="inter-token latency, over all individual gaps")
    tpot: Bounds | None = Field(default=None, description="time per output token after the first, per request")
    e2e: Bounds | None = Field(default=None, description="end-to-end latency, from the scheduled send time")
    success: float = Field(default=0.999, gt=0, le=1, description="minimum share of requests with a complete answer")

    def bounds(self) -> list[tuple[str, float, float]]:
        """Return every bound as (metric, percentile as a share, limit in seconds)."""
        metrics = {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e}
        return [
            (name, float(key[1:]) / 100, limit)
            for name, limits in metrics.items()
            for key, limit in (limits or {}).items()
        ]

    def highest_bounds(self) -> dict[str, tuple[float, float]]:
        """Return each metric's highest bounded percentile, as a share, and its limit in seconds."""
        return {metric: (share, limit) for metric, share, limit in sorted(self.bounds())}

    @property
    def highest_percentile(self) -> float:
        """Return the highest bounded percentile, as a share, over all metrics but ITL; 0.5 if there is none."""
        return max((share for metric, share, _ in self.bounds() if metric != "itl"), default=0.5)

    @model_validator(mode="after")
    def _check_bounds(self) -> SLO:
        if not any((self.ttft, self.itl, self.tpot, self.e2e)):
            raise ValueError("no bound is set; bound at least one of ttft, itl, tpot, e2e")
        for metric in ("ttft", "itl", "tpot", "e2e"):
            bounds = sorted((float(key[1:]), limit) for key, limit in (getattr(self, metric) or {}).items())
            if any(low[1] > high[1] for low, high in itertools.pairwise(bounds)):
                raise ValueError(f"{metric}: a higher percentile has a tighter bound than a lower one")
        return self
