"""Guards: each looks for one way in which a number can be false, and says so in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from powerband import metrics
from powerband.core import statistics
from powerband.core.engine import Gauges, grown
from powerband.core.measurement import CrossCheck, Verdict
from powerband.core.records import Records
from powerband.core.slo import SLO
from powerband.core.workload import Workload

LATE_S = 0.010  # a client that sends later than this, and than this part of the TTFT at a percentile, measures itself
LATE_SHARE = 0.05
CLIENT_CPU = 0.85  # of one core
SHORTFALL = 0.05
REACHED = 0.95
LOST = 0.001
REPEATED = 0.01
WARM_CACHE = 0.10
DISAGREE = 0.03
FOREIGN_CPU = 0.15  # of the machine
DRIFT = 0.25


@dataclass
class Evidence:
    """All that is known of one level when it is judged."""

    workload: Workload
    slo: SLO | None
    records: Records  # measured and complete, in the order in which they were due
    failed: int
    unanswered: int  # given up long after the window
    errors: dict[str, int]
    window_s: float
    arrived: int  # requests due within the window
    departed: int  # answers that ended within it
    mean_in_flight: float
    users: int
    capped: bool  # the user bounds the requests in flight
    client_cpu_share: float
    repeats: int
    known_share: float  # of the prompt tokens, by the workload's own words
    gauges: list[Gauges] = field(default_factory=list)
    crosschecks: list[CrossCheck] = field(default_factory=list)
    foreign_cpu_share: float | None = None
    stolen_cpu_share: float = 0.0
    warmup_s: float = 0.0
    session_s: float = 0.0  # the usual one's, from its first turn to its last; at least so long where none was over
    died: str | None = None


Finding = tuple[str, str]  # a sentence and a hint
Guard = Callable[[Evidence], Finding | None]


def client_late(evidence: Evidence) -> Finding | None:
    """The client sends late or has no CPU left: its own delay would be measured."""
    if evidence.client_cpu_share > CLIENT_CPU:
        said = f"the client itself used {evidence.client_cpu_share:.0%} of a core: what you see is the client"
        return said, "give it more --senders, send from another machine, or lower the load"
    if evidence.capped or not len(evidence.records):
        return None
    lags, waits = sorted(metrics.send_lag(evidence.records)), sorted(metrics.ttft(evidence.records))
    for percentile in (50, 95, 99):
        lag = statistics.quantile(lags, percentile / 100)
        if lag > max(LATE_S, LATE_SHARE * statistics.quantile(waits, percentile / 100)):
            said = f"the client sent {lag * 1e3:.0f} ms late (p{percentile})"
            return said, "free the client's CPU, or lower the load"
    return None


def overload(evidence: Evidence) -> Finding | None:
    """More arrives than leaves: the latency is that of a growing queue and depends on how long you look."""
    if evidence.users:
        return None
    if evidence.unanswered:
        said = (
            f"{evidence.unanswered} of {evidence.arrived} requests had no answer long after: what you see is the queue"
        )
        return said, "lower the rate, or find the highest one that holds with --profile climb"
    behind = evidence.arrived - evidence.departed
    noise = 4 * math.sqrt(evidence.mean_in_flight + 1)
    if behind <= max(SHORTFALL * evidence.arrived, noise):
        return None
    rate = evidence.departed / evidence.window_s
    offered = evidence.arrived / evidence.window_s
    said = f"{offered:.3g} requests/s were offered and {rate:.3g} answered: what you see is the queue"
    return said, "lower the rate, or find the highest one that holds with --profile climb"


def concurrency(evidence: Evidence) -> Finding | None:
    """A closed loop that did not keep its users busy; who is alone may think between turns."""
    if evidence.users < 2 or evidence.mean_in_flight >= REACHED * evidence.users:
        return None
    said = f"{evidence.users} requests should have been in flight and {evidence.mean_in_flight:.1f} were on average"
    return said, "ask for more requests, or for fewer users"


def lost(evidence: Evidence) -> Finding | None:
    """Answers that never came, broke off, or are shorter than what was asked for."""
    total = len(evidence.records) + evidence.failed
    short = 0
    if evidence.workload.ending == "exact":
        rows = zip(metrics.tokens(evidence.records), evidence.records["asked"], strict=True)
        short = sum(got < asked for got, asked in rows)
    if not total or (evidence.failed + short) <= LOST * total:
        return None
    reasons = "; ".join(f"{count} x {what}" for what, count in list(evidence.errors.items())[:3])
    parts = [f"{evidence.failed} of {total} answers were lost" + (f" ({reasons})" if reasons else "")]
    parts += [f"{short} were shorter than asked for"] if short else []
    return "; ".join(parts), "read the engine's log; where answers may end by themselves, set 'ending: natural'"


def repeated(evidence: Evidence) -> Finding | None:
    """The same prompts again, or a cache that knows more than the workload repeats."""
    total = len(evidence.records) + evidence.failed
    if evidence.repeats > REPEATED * max(total, 1):
        said = f"{evidence.repeats} requests repeat an earlier prompt, and the workload does not say so"
        return said, "give more prompts than requests, or set 'repeat: true' if users really do so"
    queries, hits = grown(evidence.gauges, "prefix_queries_tokens"), grown(evidence.gauges, "prefix_hits_tokens")
    if queries and hits is not None and hits / queries > evidence.known_share + WARM_CACHE:
        said = (
            f"the engine knew {hits / queries:.0%} of the prompts and the workload repeats {evidence.known_share:.0%}"
        )
        return said, "its cache is warm from an earlier run: give another --seed, or restart the engine"
    return None


def preempted(evidence: Evidence) -> Finding | None:
    """The engine threw requests out of its KV cache and computed them again."""
    count = grown(evidence.gauges, "preemptions")
    if not count:
        return None
    said = f"the engine preempted {count:.0f} requests: its KV cache is too small for this load"
    return said, "give it more KV cache, fewer concurrent requests, or lower the load"


def tokens_disagree(evidence: Evidence) -> Finding | None:
    """Client and engine count different tokens, or the chunks say more than the usage."""
    told = sum(evidence.records["output"])
    if not told:
        return (
            ("the server tells no usage, so tokens cannot be counted", "use a server that honours include_usage")
            if len(evidence.records)
            else None
        )
    chunks = sum(evidence.records["chunks"])
    if chunks > told * (1 + DISAGREE):
        return f"{chunks} chunks came and the server tells of {told} tokens", "the server's usage is wrong; report it"
    asked = sum(evidence.records["asked"])
    if evidence.workload.ending == "exact" and told > asked * (1 + DISAGREE):
        return f"{asked} tokens were asked for and the server tells of {told}", "the server's usage is wrong; report it"
    for agreement in evidence.crosschecks:
        if agreement.what == "output tokens" and agreement.difference > DISAGREE:
            said = f"the client received {agreement.client:.0f} tokens and the engine counts {agreement.engine:.0f}"
            return said, "does somebody else use this server?"
    return None


def restarted(evidence: Evidence) -> Finding | None:
    """The engine died, or its counters went back."""
    if evidence.died:
        return f"the engine died: {evidence.died}", "read its log"
    for name in ("output_tokens", "prompt_tokens"):
        values = [value for gauges in evidence.gauges if (value := getattr(gauges, name)) is not None]
        if any(later < earlier for earlier, later in pairwise(values)):
            return "the engine restarted while it was measured: its counters went back", "read its log"
    return None


def too_few(evidence: Evidence) -> Finding | None:
    """Not enough requests for the percentiles that the SLO speaks of."""
    highest = evidence.slo.highest if evidence.slo else 0.5
    need = statistics.needed(highest)
    if len(evidence.records) >= need:
        return None
    said = f"{len(evidence.records)} requests cannot tell the p{highest * 100:g}; {need} can"
    return said, f"measure longer: --requests {math.ceil(need * 1.5)}"


def unsteady(evidence: Evidence) -> Finding | None:
    """The second half of the window is not like the first."""
    if evidence.session_s > evidence.warmup_s:
        said = f"not steady: sessions take {evidence.session_s:.0f} s, and after {evidence.warmup_s:.0f} s"
        return (
            f"{said}, when the window began, later turns were missing",
            "ask for fewer turns, or for shorter pauses between them",
        )
    if len(evidence.records) < 40:
        return None
    for name, of in (("TTFT", metrics.ttft), ("answer time", metrics.e2e)):
        ratio = statistics.halves(of(evidence.records))
        drifted = ratio.low > 1 + DRIFT or ratio.high < 1 / (1 + DRIFT)
        if drifted:
            said = f"not steady: the median {name} of the second half is {ratio.value:.2f} times that of the first"
            return said, "measure longer, or lower the load"
    return None


def foreign_load(evidence: Evidence) -> Finding | None:
    """Somebody else used the machine meanwhile."""
    share = evidence.foreign_cpu_share
    if share is None or share <= FOREIGN_CPU:
        return None
    said = f"other work took {share:.0%} of this machine's CPU meanwhile"
    said += f" ({evidence.stolen_cpu_share:.0%} taken by its host)" if evidence.stolen_cpu_share > 0.02 else ""
    return said, "stop it and measure again"


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
    "foreign load": foreign_load,
}


# What speaks of the measuring and not of the load: the same load may be held again.
TROUBLE = frozenset({"client", "repeated prompts", "token counts", "engine restart", "sample size", "foreign load"})


def judge(evidence: Evidence) -> Iterator[Verdict]:
    """Ask every guard."""
    for name, guard in GUARDS.items():
        if found := guard(evidence):
            yield Verdict(guard=name, valid=False, sentence=found[0], hint=found[1])
        else:
            yield Verdict(guard=name, valid=True, sentence=(guard.__doc__ or "").split(".")[0].split(":")[0] + ": no")
