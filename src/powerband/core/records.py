"""Request records: the raw timestamps of every request of a run, as columns. What they mean is told in `metrics`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OUTCOMES = ("answered", "broken off", "not connected", "cancelled")
FINISHES = ("", "stop", "length", "other")

# name -> array type. Times are nanoseconds from the start of the clock; 0 in `first` says that nothing came.
COLUMNS = {
    "number": "Q",  # which request of the traffic
    "due": "q",  # when it should have been sent
    "sent": "q",  # when it was
    "head": "q",  # when the first byte of an answer came
    "first": "q",  # when its first content came
    "end": "q",  # when its last byte came
    "status": "H",
    "outcome": "B",
    "done": "B",  # the stream said that it is complete
    "retried": "B",  # sent again because an idle connection had been closed
    "asked": "I",  # tokens asked for
    "prompt": "I",  # tokens, by the server's word; 0: it did not say
    "output": "I",
    "chunks": "I",  # events with content
    "finish": "B",
    "engine_us": "I",  # the engine's own time to the first token, where it tells; 0: it does not
    "gap_ends": "Q",  # where this request's gaps end in `gaps`
}


@dataclass
class Records:
    """Columns over requests; `gaps` holds the microseconds between contents, request after request."""

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
        """Return the records of these rows, in that order."""
        chosen, rows = Records(), list(rows)
        for name, column in self.columns.items():
            if name != "gap_ends":
                chosen.columns[name] = array(column.typecode, (column[row] for row in rows))
        for row in rows:
            chosen.gaps.extend(self.gaps_of(row))
            chosen.columns["gap_ends"].append(len(chosen.gaps))
        return chosen

    def ordered(self, by: str) -> Records:
        """Return the records in the order of these times."""
        when = self.columns[by]
        if all(when[row] <= when[row + 1] for row in range(len(when) - 1)):
            return self
        return self.select(sorted(range(len(self)), key=when.__getitem__))

    def complete(self) -> Iterator[bool]:
        """Tell of each request whether it was answered in full."""
        for outcome, status, done, first in zip(
            self["outcome"], self["status"], self["done"], self["first"], strict=True
        ):
            yield outcome == 0 and status == 200 and bool(done) and first > 0

    @property
    def stored(self) -> dict[str, array[int]]:
        """Return everything that is kept on disk."""
        return {**self.columns, "gaps": self.gaps}
