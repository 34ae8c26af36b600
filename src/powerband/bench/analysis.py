"""From records to distributions and promises: pure functions, the same for ten requests and for a million."""

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
    """One latency: its values sorted, and how many of each lump of requests lie beyond a bound."""

    def __init__(self, ordered: Sequence[float], *, sizes: list[int], mean: Interval) -> None:
        self.ordered, self.sizes, self.mean = ordered, sizes, mean

    def beyond(self, bound: float) -> list[int]:
        """Count the values above a bound, lump by lump."""
        raise NotImplementedError

    def quantile(self, p: float) -> float:
        """Return the p-quantile in seconds."""
        return statistics.quantile(self.ordered, p)

    def effective(self, p: float, bound: float | None = None) -> float:
        """Return how many independent samples these are worth at the p-quantile."""
        at = self.quantile(p) if bound is None else bound
        return len(self.ordered) / statistics.design_effect(self.beyond(at), self.sizes)

    def interval(self, p: float, effective: float) -> Interval:
        """Return the p-quantile with its interval, in seconds."""
        return statistics.quantile_interval(self.ordered, p, effective)


class PerRequest(Sample):
    """A latency that each request has once; the values come in the order in which they were due."""

    def __init__(self, values: array[float]) -> None:
        self.values, self.bounds = values, statistics.batch_bounds(len(values))
        sizes = [end - begin for begin, end in self.bounds]
        super().__init__(sorted(values), sizes=sizes, mean=statistics.mean_interval(values))

    def beyond(self, bound: float) -> list[int]:
        return [sum(value > bound for value in self.values[begin:end]) for begin, end in self.bounds]


class Gaps(Sample):
    """The gaps of all requests, in microseconds; a lump is the gaps of consecutive requests."""

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
        spread = (
            statistics.mean_interval(means, lumps=len(means)) if len(means) > 4 else Interval(overall, overall, overall)
        )
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
    """Return every latency of complete requests, in the order in which they were due."""
    found: dict[str, Sample] = {}
    for name, of in metrics.PER_REQUEST.items():
        if values := of(records):
            found[name] = PerRequest(values)
    if len(records.gaps):
        found["itl"] = Gaps(records)
    return {name: found[name] for name in metrics.LATENCIES if name in found}


def distribution(sample: Sample) -> Distribution:
    """Return the percentiles that the sample supports, each with its interval."""
    percentiles, unsupported, least = {}, [], float(len(sample.ordered))
    for percentile in statistics.PERCENTILES:
        p, name = percentile / 100, f"p{percentile:g}"
        effective = sample.effective(p)
        if statistics.supported(p, len(sample.ordered), effective):
            percentiles[name] = sample.interval(p, effective)
            least = min(least, effective)
        else:
            unsupported.append(name)
    return Distribution(
        count=len(sample.ordered),
        effective=least,
        mean=sample.mean,
        percentiles=percentiles,
        unsupported=tuple(unsupported),
        grid=tuple(sample.quantile(p) for p in GRID),
    )


def slo_checks(slo: SLO, found: dict[str, Sample], *, failed: int) -> tuple[SLOCheck, ...]:
    """Judge each bound of the SLO; a request that failed kept none of them."""
    kept = []
    for metric in metrics.LATENCIES:
        for name, limit in sorted((getattr(slo, metric) or {}).items()):
            sample, p = found.get(metric), float(name[1:]) / 100
            if sample is None:
                continue
            beyond = sum(sample.beyond(limit))
            count = len(sample.ordered)
            lost = failed * (count / max(1, len(found["e2e"].ordered)) if metric == "itl" else 1)
            effective = sample.effective(p, limit) / count * (count + lost)
            share = (count - beyond) / (count + lost)
            interval = statistics.wilson(share * effective, effective)
            verdict = "met" if interval.low >= p else "missed" if interval.high < p else "undecided"
            supported = statistics.supported(p, count, sample.effective(p))
            kept.append(
                SLOCheck(
                    metric=metric,
                    percentile=name,
                    limit_s=limit,
                    value_s=sample.quantile(p) if supported else None,
                    share=interval,
                    verdict=verdict,
                )
            )
    return tuple(kept)


def good(slo: SLO, records: Records) -> int:
    """Return how many requests kept every bound of the SLO by themselves."""
    values = {"ttft": metrics.ttft(records), "e2e": metrics.e2e(records)}
    spans = zip(values["ttft"], values["e2e"], metrics.tokens(records), strict=True)
    values["tpot"] = array("d", ((end - first) / max(1, count - 1) for first, end, count in spans))
    fine = [True] * len(records)
    for metric, (share, limit) in slo.widest().items():
        for row in range(len(records)):
            if metric == "itl":
                gaps = records.gaps_of(row)
                fine[row] &= sum(gap <= limit * 1e6 for gap in gaps) >= share * len(gaps)
            else:
                fine[row] &= values[metric][row] <= limit
    return sum(fine)
