"""Request records: the raw timestamps of every request of a run, as columns. `metrics` derives latencies from them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OUTCOMES = ("answered", "connection lost", "not connected", "cancelled")
FINISHES = ("", "stop", "length", "other")

# name -> array type code. Times are nanoseconds since the start of the run; `first` is 0 if no content arrived.
COLUMNS = {
    "number": "Q",  # index of the request in the traffic
    "due": "q",  # scheduled send time
    "sent": "q",  # actual send time
    "head": "q",  # first byte of the response
    "first": "q",  # first content
    "end": "q",  # last byte of the response
    "status": "H",  # HTTP status
    "outcome": "B",  # index in OUTCOMES
    "done": "B",  # the stream ended with [DONE]
    "retried": "B",  # resent because the server had closed an idle connection
    "asked": "I",  # max_tokens of the request
    "prompt": "I",  # prompt tokens by the server's usage; 0: not reported
    "output": "I",  # output tokens by the server's usage; 0: not reported
    "chunks": "I",  # events with content
    "finish": "B",  # index in FINISHES
    "engine_us": "I",  # time to first token as reported by the engine; 0: not reported
    "gap_ends": "Q",  # end index of this request's gaps in `gaps`
}


@dataclass
class Records:
    """One row per request; `gaps` holds the microseconds between content events, request after request."""

    columns: dict[str, array[int]] = field(
        default_factory=lambda: {name: array(code) for name, code in COLUMNS.items()}
    )
    gaps: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.columns["number"])

    def __getitem__(self, name: str) -> array[int]:
        return self.columns[name]

    def add(self, gaps: Iterable[int], **values: int) -> None:
        """Append one request."""
        self.gaps.extend(gaps)
        values["gap_ends"] = len(self.gaps)
        for name, column in self.columns.items():
            column.append(values[name])

    def gaps_of(self, row: int) -> array[int]:
        """Return the gaps of one request, in microseconds."""
        ends = self.columns["gap_ends"]
        return self.gaps[ends[row - 1] if row else 0 : ends[row]]

    def extend(self, more: Records) -> None:
        """Append the records of another run."""
        before = len(self.gaps)
        for name, column in self.columns.items():
            column.extend(end + before for end in more[name]) if name == "gap_ends" else column.extend(more[name])
        self.gaps.extend(more.gaps)

    def select(self, rows: Iterable[int]) -> Records:
        """Return the given rows, in the given order."""
        chosen, rows = Records(), list(rows)
        for name, column in self.columns.items():
            if name != "gap_ends":
                chosen.columns[name] = array(column.typecode, (column[row] for row in rows))
        for row in rows:
            chosen.gaps.extend(self.gaps_of(row))
            chosen.columns["gap_ends"].append(len(chosen.gaps))
        return chosen

    def ordered(self, by: str) -> Records:
        """Return the records sorted by a time column."""
        when = self.columns[by]
        if all(when[row] <= when[row + 1] for row in range(len(when) - 1)):
            return self
        return self.select(sorted(range(len(self)), key=when.__getitem__))

    def complete(self) -> Iterator[bool]:
        """Yield for each request whether it received a complete answer."""
        for outcome, status, done, first in zip(
            self["outcome"], self["status"], self["done"], self["first"], strict=True
        ):
            yield outcome == 0 and status == 200 and bool(done) and first > 0

    @property
    def stored(self) -> dict[str, array[int]]:
        """Return all columns as they are stored on disk."""
        return {**self.columns, "gaps": self.gaps}
