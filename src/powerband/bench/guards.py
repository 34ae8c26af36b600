"""Guards: each detects one way in which a measurement can be wrong, and states it in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from powerband import metrics
from powerband.core import statistics
from powerband.core.engine import Gauges, counter_increase
from powerband.core.measurement import CrossCheck, Verdict
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload

LATE_S = 0.010  # the client may send this late, or by LATE_SHARE of the TTFT at the same percentile if that is more
LATE_SHARE = 0.05
CLIENT_CPU = 0.85  # of one core
SHORTFALL = 0.05
REACHED = 0.95
LOST = 0.001
REPEATED = 0.01
WARM_CACHE = 0.10
DISAGREE = 0.03
BACKGROUND_CPU = 0.15  # of the machine
DRIFT = 0.25
_MIN_STOLEN = 0.02  # of the machine: CPU steal below this is not mentioned
_MIN_DRIFT_REQUESTS = 40


@dataclass
class Evidence:
    """Everything the guards need to judge one level."""

    workload: Workload
    slo: SLO | None
    records: Records  # complete requests of the window, by scheduled send time
    failed: int
    unanswered: int  # cancelled at the end of the drain period
    errors: dict[str, int]
    window_s: float
    arrived: int  # requests due within the window
    departed: int  # answers that ended within it
    mean_in_flight: float
    users: int  # of a closed loop; 0: open arrivals
    capped: bool  # --max-in-flight is set
    client_cpu_share: float
    repeats: int
    cacheable_share: float  # of the prompt tokens, by the workload's shared prefixes
    gauges: list[Gauges] = field(default_factory=list)
    crosschecks: list[CrossCheck] = field(default_factory=list)
    background_cpu_share: float | None = None
    stolen_cpu_share: float = 0.0
    warmup_s: float = 0.0
    session_s: float = 0.0  # median duration of a session; a lower bound if none has ended
    died: str | None = None


Finding = tuple[str, str]  # a sentence and a hint
Guard = Callable[[Evidence], Finding | None]


def client_late(evidence: Evidence) -> Finding | None:
    """Requests sent late, or a client without spare CPU: latencies would include client delay."""
    if evidence.client_cpu_share > CLIENT_CPU:
        return (
            f"the client used {evidence.client_cpu_share:.0%} of a CPU core (limit {CLIENT_CPU:.0%}), "
            "so latencies include client delay",
            "raise --senders, run the client on another machine, or lower the load",
        )
    if evidence.capped or not len(evidence.records):
        return None
    lags, waits = sorted(metrics.send_lag(evidence.records)), sorted(metrics.ttft(evidence.records))
    for percentile in (50, 95, 99):
        lag = statistics.quantile(lags, percentile / 100)
        limit = max(LATE_S, LATE_SHARE * statistics.quantile(waits, percentile / 100))
        if lag > limit:
            sentence = f"the client sent requests {lag * 1e3:.0f} ms late at p{percentile} (limit {limit * 1e3:.0f} ms)"
            return sentence, "free CPU on the client's machine, or lower the load"
    return None


def overload(evidence: Evidence) -> Finding | None:
    """Saturation: requests arrive faster than they are answered, so latency grows with the duration of the run."""
    if evidence.users:
        return None
    hint = "lower --rate, or find the highest rate within the SLO with --profile climb"
    if evidence.unanswered:
        counts = f"{evidence.unanswered} of {evidence.arrived} requests unanswered after the drain period, limit 0"
        return f"saturated: latency is queueing time ({counts})", hint
    behind = evidence.arrived - evidence.departed
    noise = 4 * math.sqrt(evidence.mean_in_flight + 1)
    allowed = max(SHORTFALL * evidence.arrived, noise)
    if behind <= allowed:
        return None
    offered, answered = evidence.arrived / evidence.window_s, evidence.departed / evidence.window_s
    rates = f"{offered:.3g} req/s offered, {answered:.3g} req/s answered"
    limit = f"shortfall {behind / evidence.arrived:.0%}, limit {allowed / evidence.arrived:.0%}"
    return f"saturated: latency is queueing time ({rates}; {limit})", hint


def concurrency(evidence: Evidence) -> Finding | None:
    """Fewer requests in flight than closed-loop users. One user is not checked: it may pause between turns."""
    if evidence.users < 2 or evidence.mean_in_flight >= REACHED * evidence.users:
        return None
    return (
        f"{evidence.mean_in_flight:.1f} requests were in flight on average, with {evidence.users} users "
        f"(minimum {REACHED * evidence.users:.1f})",
        "measure longer with --requests, lower --users, or raise --max-in-flight",
    )


def lost(evidence: Evidence) -> Finding | None:
    """Failed requests, or answers shorter than requested."""
    total = len(evidence.records) + evidence.failed
    short = 0
    if evidence.workload.ending == "exact":
        rows = zip(metrics.tokens(evidence.records), evidence.records["asked"], strict=True)
        short = sum(received < requested for received, requested in rows)
    if not total or (evidence.failed + short) <= LOST * total:
        return None
    reasons = "; ".join(f"{count} x {what}" for what, count in list(evidence.errors.items())[:3])
    counts = f"{evidence.failed} of {total} requests failed"
    counts += f" and {short} answers were shorter than requested" if short else ""
    return (
        f"{counts}, limit {LOST:.1%}" + (f" ({reasons})" if reasons else ""),
        "read the engine's log; if answers may end early, set 'ending: natural' in the workload",
    )


def repeated(evidence: Evidence) -> Finding | None:
    """Repeated prompts, or more prefix-cache hits than the workload's shared prefixes explain."""
    total = len(evidence.records) + evidence.failed
    if evidence.repeats > REPEATED * max(total, 1):
        return (
            f"{evidence.repeats} of {total} requests repeat an earlier prompt (limit {REPEATED:.0%})",
            "provide more prompts than requests, or set 'repeat: true' for the dataset if real traffic repeats prompts",
        )
    queries = counter_increase(evidence.gauges, "prefix_queries_tokens")
    hits = counter_increase(evidence.gauges, "prefix_hits_tokens")
    allowed = evidence.cacheable_share + WARM_CACHE
    if queries and hits is not None and hits / queries > allowed:
        return (
            f"{hits / queries:.0%} prefix-cache hits, but the workload shares only {evidence.cacheable_share:.0%} "
            f"of its prompt tokens (limit {allowed:.0%})",
            "the prefix cache holds prompts of an earlier run: use another --seed, or restart the engine",
        )
    return None


def preempted(evidence: Evidence) -> Finding | None:
    """Requests that the engine evicted from its KV cache and recomputed."""
    count = counter_increase(evidence.gauges, "preemptions")
    if not count:
        return None
    sentence = f"the engine preempted {count:.0f} requests (limit 0): its KV cache is too small for this load"
    return sentence, "increase the engine's KV cache, lower its maximum batch size, or lower the load"


def tokens_disagree(evidence: Evidence) -> Finding | None:
    """Token counts that differ between the client, the server's usage and the engine's counters."""
    reported = sum(evidence.records["output"])
    if not reported:
        missing = "the server reports no usage, so output tokens cannot be counted"
        return (missing, "use a server that supports stream_options.include_usage") if len(evidence.records) else None
    wrong_usage = "the server's usage is wrong: report it to the server's developers"
    chunks = sum(evidence.records["chunks"])
    if chunks > reported * (1 + DISAGREE):
        counts = f"the server sent {chunks} content events but reports {reported} output tokens"
        return f"{counts} (limit {DISAGREE:.0%} more)", wrong_usage
    requested = sum(evidence.records["asked"])
    if evidence.workload.ending == "exact" and reported > requested * (1 + DISAGREE):
        counts = f"the server reports {reported} output tokens but {requested} were requested"
        return f"{counts} (limit {DISAGREE:.0%} more)", wrong_usage
    for check in evidence.crosschecks:
        if check.what == "output tokens" and check.difference > DISAGREE:
            return (
                f"the client received {check.client:.0f} output tokens but the engine counted {check.engine:.0f} "
                f"(difference {check.difference:.1%}, limit {DISAGREE:.0%})",
                "stop other clients of this server, then measure again",
            )
    return None


def restarted(evidence: Evidence) -> Finding | None:
    """An engine that died, or whose counters decreased."""
    if evidence.died:
        return f"the engine died ({evidence.died})", "read the engine's log"
    for name in ("output_tokens", "prompt_tokens"):
        values = [value for gauges in evidence.gauges if (value := getattr(gauges, name)) is not None]
        if any(later < earlier for earlier, later in pairwise(values)):
            return f"the engine restarted during the measurement: its {name} decreased", "read the engine's log"
    return None


def too_few(evidence: Evidence) -> Finding | None:
    """Too few requests for the highest percentile of the SLO."""
    highest = evidence.slo.highest_percentile if evidence.slo else 0.5
    need = statistics.min_samples(highest)
    if len(evidence.records) >= need:
        return None
    sentence = f"p{highest * 100:g} needs at least {need} requests, {len(evidence.records)} were measured"
    return sentence, f"measure longer with --requests {math.ceil(need * 1.5)}"


def unsteady(evidence: Evidence) -> Finding | None:
    """A latency drift between the halves of the window, or sessions longer than the warm-up."""
    if evidence.session_s > evidence.warmup_s:
        return (
            f"not in steady state: sessions take {evidence.session_s:.0f} s (median) but the warm-up took "
            f"{evidence.warmup_s:.0f} s, so later turns are missing from the window",
            "lower turns.count or turns.think_s in the workload",
        )
    if len(evidence.records) < _MIN_DRIFT_REQUESTS:
        return None
    for name, of in (("TTFT", metrics.ttft), ("E2E", metrics.e2e)):
        ratio = statistics.second_half_ratio(of(evidence.records))
        if ratio.low > 1 + DRIFT or ratio.high < 1 / (1 + DRIFT):
            return (
                f"not in steady state: the median {name} of the second half is {ratio.value:.2f} times that of the "
                f"first (limit {1 / (1 + DRIFT):.2f} to {1 + DRIFT:.2f})",
                "measure longer with --duration, or lower the load",
            )
    return None


def background_load(evidence: Evidence) -> Finding | None:
    """CPU load of other processes on this machine."""
    share = evidence.background_cpu_share
    if share is None or share <= BACKGROUND_CPU:
        return None
    sentence = f"background CPU load was {share:.0%} (limit {BACKGROUND_CPU:.0%})"
    if evidence.stolen_cpu_share > _MIN_STOLEN:
        sentence += f", including {evidence.stolen_cpu_share:.0%} CPU steal"
    return sentence, "stop other processes on this machine, then measure again"


GUARDS: dict[str, Guard] = {
    "client": client_late,
    "overload": overload,
    "concurrency": concurrency,
    "lost answers": lost,
    "repeated prompts": repeated,
    "preemptions": preempted,
    "token counts": tokens_disagree,
    "engine restart": restarted,
    "sample size": too_few,
    "steady state": unsteady,
    "background load": background_load,
}


# Guards that reject the measurement rather than the load: the same load can be measured again.
MEASUREMENT_FAULTS = frozenset(
    {"client", "repeated prompts", "token counts", "engine restart", "sample size", "background load"}
)


def judge(evidence: Evidence) -> Iterator[Verdict]:
    """Yield the verdict of every guard."""
    for name, guard in GUARDS.items():
        if found := guard(evidence):
            yield Verdict(guard=name, valid=False, sentence=found[0], hint=found[1])
        else:
            fault = (guard.__doc__ or "").split(".")[0].split(":")[0]
            yield Verdict(guard=name, valid=True, sentence=f"not detected: {fault}")
