"""The cost ledger: what each way of scaling would have cost on the arrivals so far, the best fixed size included.

Each candidate runs a virtual fleet of its own: it pays for its replicas from the decision to start them, gets them
after the start time, and is late for the requests beyond its slots. The arrivals do not depend on what the real fleet
does, so the account of every candidate is known, also of those that are not followed. The candidate with the lowest
account is followed; as long as following the demand costs more than the best fixed size so far, that size is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Candidate:
    """A way of scaling, what it asks for now, and the virtual fleet that does so."""

    name: str
    wanted: int
    ready: int
    starting: deque[float] = field(default_factory=deque)  # when each starting replica is ready
    paid_s: float = 0.0  # replica-seconds
    late: float = 0.0  # requests

    def advance(self, now_s: float, seconds: float, *, start_s: float, late: Callable[[int], float]) -> None:
        """Pay for the last seconds, and start and stop virtual replicas as wanted."""
        while self.starting and self.starting[0] <= now_s:
            self.starting.popleft()
            self.ready += 1
        self.paid_s += seconds * (self.ready + len(self.starting))
        self.late += late(self.ready)
        missing = self.wanted - self.ready - len(self.starting)
        self.starting.extend([now_s + start_s] * missing)
        while missing < 0 and self.starting:
            self.starting.pop()
            missing += 1
        self.ready += min(0, missing)


class Ledger:
    """The accounts of all candidates; the first one is the fixed size, which is followed until another is cheaper."""

    def __init__(self, names: Sequence[str], *, initial: int, margin: float) -> None:
        self._margin = margin
        self.candidates = [Candidate(name, initial, initial) for name in names]
        self.followed = self.fixed = self.candidates[0]

    def advance(self, now_s: float, seconds: float, *, start_s: float, late: Callable[[int], float]) -> None:
        """Advance all virtual fleets; `late` returns the requests of the last seconds that a number is late for."""
        for one in self.candidates:
            one.advance(now_s, seconds, start_s=start_s, late=late)

    def choose(self, price_s: float, *, exposure: Callable[[int], float]) -> None:
        """Follow the cheapest candidate, with `price_s` replica-seconds for a late request.

        `exposure` returns the late requests that a peak not seen yet would cause with a number of replicas.
        """

        def account(one: Candidate) -> float:
            return one.paid_s + price_s * (one.late + exposure(one.ready))

        best = min(self.candidates, key=account)
        if account(best) < account(self.followed) * (1 - self._margin):
            self.followed = best

    def relative_cost(self, price_s: float) -> float:
        """Return the account of the followed candidate as a share of that of the fixed size."""
        fixed = self.fixed.paid_s + price_s * self.fixed.late
        return (self.followed.paid_s + price_s * self.followed.late) / fixed if fixed else 1.0
