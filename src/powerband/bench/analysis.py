"""Compute distributions and SLO checks from request records."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from powerband import metrics
from powerband.core import counting, statistics
from powerband.core.measurement import GRID, Distribution, SLOCheck
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.statistics import Interval


class Sample:
    """The values of one latency metric, sorted, and counts beyond a bound per batch of consecutive requests."""

    def __init__(self, ordered: Sequence[float], *, sizes: list[int], mean: Interval) -> None:
        self.ordered, self.sizes, self.mean = ordered, sizes, mean

    def beyond(self, bound: float) -> list[int]:
        """Return the number of values above a bound in each batch."""
        raise NotImplementedError

    def quantile(self, p: float) -> float:
        """Return the p-quantile in seconds."""
        return statistics.quantile(self.ordered, p)

    def effective(self, p: float, bound: float | None = None) -> float:
        """Return the effective sample size at the p-quantile, or at a bound."""
        at = self.quantile(p) if bound is None else bound
        return len(self.ordered) / statistics.design_effect(self.beyond(at), self.sizes)

    def interval(self, p: float, effective: float) -> Interval:
        """Return the p-quantile with its interval, in seconds."""
        return statistics.quantile_interval(self.ordered, p, effective)


class PerRequest(Sample):
    """A latency with one value per request, ordered by scheduled send time."""

    def __init__(self, values: array[float]) -> None:
        self.values, self.bounds = values, statistics.batch_bounds(len(values))
        sizes = [end - begin for begin, end in self.bounds]
        super().__init__(sorted(values), sizes=sizes, mean=statistics.mean_interval(values))

    def beyond(self, bound: float) -> list[int]:
        return [sum(value > bound for value in self.values[begin:end]) for begin, end in self.bounds]


class Gaps(Sample):
    """The gaps of all requests, in microseconds; a batch holds the gaps of consecutive requests."""

    def __init__(self, records: Records) -> None:
        self.gaps, ends = records.gaps, records["gap_ends"]
        bounds = [ends[end - 1] for _, end in statistics.batch_bounds(len(records))]
        self.ends = array("q", bounds)
        sizes = [end - begin for begin, end in zip([0, *bounds[:-1]], bounds, strict=True)]
        means = array(
            "d",
            (sum(self.gaps[end - size : end]) / size / 1e6 for end, size in zip(bounds, sizes, strict=True) if size),
        )
        overall = sum(self.gaps) / len(self.gaps) / 1e6
        spread = Interval(overall, overall, overall)
        if len(means) > 4:
            spread = statistics.mean_interval(means, batches=len(means))
        mean = Interval(overall, overall + spread.low - spread.value, overall + spread.high - spread.value)
        ordered = array("I", self.gaps)
        counting.sort_u32(ordered)
        super().__init__(ordered, sizes=sizes, mean=mean)

    def beyond(self, bound: float) -> list[int]:
        return list(counting.count_above(self.gaps, self.ends, int(bound * 1e6)))

    def quantile(self, p: float) -> float:
        return super().quantile(p) / 1e6

    def interval(self, p: float, effective: float) -> Interval:
        found = super().interval(p, effective)
        return Interval(found.value / 1e6, found.low / 1e6, found.high / 1e6)


def samples(records: Records) -> dict[str, Sample]:
    """Return the samples of every latency metric of complete requests, ordered by scheduled send time."""
    found: dict[str, Sample] = {}
    for name, of in metrics.PER_REQUEST.items():
        if values := of(records):
            found[name] = PerRequest(values)
    if len(records.gaps):
        found["itl"] = Gaps(records)
    return {name: found[name] for name in metrics.LATENCIES if name in found}


def distribution(sample: Sample) -> Distribution:
    """Return the percentiles for which there are enough samples, each with its interval."""
    percentiles, unsupported, min_effective = {}, [], float(len(sample.ordered))
    for percentile in statistics.PERCENTILES:
        p, name = percentile / 100, f"p{percentile:g}"
        effective = sample.effective(p)
        if statistics.supported(p, len(sample.ordered), effective):
            percentiles[name] = sample.interval(p, effective)
            min_effective = min(min_effective, effective)
        else:
            unsupported.append(name)
    return Distribution(
        count=len(sample.ordered),
        effective=min_effective,
        mean=sample.mean,
        percentiles=percentiles,
        unsupported=tuple(unsupported),
        grid=tuple(sample.quantile(p) for p in GRID),
    )


def slo_checks(slo: SLO, found: dict[str, Sample], *, failed: int) -> tuple[SLOCheck, ...]:
    """Check each bound of the SLO; a failed request counts as beyond every bound."""
    checks = []
    for metric in metrics.LATENCIES:
        for name, limit in sorted((getattr(slo, metric) or {}).items()):
            sample, p = found.get(metric), float(name[1:]) / 100
            if sample is None:
                continue
            beyond = sum(sample.beyond(limit))
            count = len(sample.ordered)
            failures = failed * (count / max(1, len(found["e2e"].ordered)) if metric == "itl" else 1)
            effective = sample.effective(p, limit) / count * (count + failures)
            share = (count - beyond) / (count + failures)
            interval = statistics.wilson(share * effective, effective)
            verdict = "met" if interval.low >= p else "missed" if interval.high < p else "undecided"
            supported = statistics.supported(p, count, sample.effective(p))
            checks.append(
                SLOCheck(
                    metric=metric,
                    percentile=name,
                    limit_s=limit,
                    value_s=sample.quantile(p) if supported else None,
                    share=interval,
                    verdict=verdict,
                )
            )
    return tuple(checks)


def good(slo: SLO, records: Records) -> int:
    """Return the number of requests that individually meet the highest bound of every metric."""
    values = {"ttft": metrics.ttft(records), "e2e": metrics.e2e(records)}
    spans = zip(values["ttft"], values["e2e"], metrics.tokens(records), strict=True)
    values["tpot"] = array("d", ((end - first) / max(1, count - 1) for first, end, count in spans))
    within = [True] * len(records)
    for metric, (share, limit) in slo.highest_bounds().items():
        for row in range(len(records)):
            if metric == "itl":
                gaps = records.gaps_of(row)
                within[row] &= sum(gap <= limit * 1e6 for gap in gaps) >= share * len(gaps)
            else:
                within[row] &= values[metric][row] <= limit
    return sum(within)
