"""Count the tokens of an answer whose bytes pass through the picker, without parsing each event."""

from __future__ import annotations

import re

_EVENT = b"data: {"
_TAIL_BYTES = 4096  # of an answer: engines write its usage last
_COUNTS = {name: re.compile(rb'"%b"\s*:\s*(\d+)' % name) for name in (b"prompt_tokens", b"completion_tokens")}
_ERROR_EVENT = re.compile(rb'(?:^|\n)data: \{"error"')


class AnswerUsage:
    """Tokens of one answer: what its usage says, else the number of its events."""

    def __init__(self) -> None:
        self._events = 0
        self._tail = b""

    def add(self, chunk: bytes) -> None:
        """Read the next bytes of the answer."""
        joined = self._tail[1 - len(_EVENT) :] + chunk  # an event's start may be cut in two
        self._events += joined.count(_EVENT)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt's tokens; 0 if the answer does not report them."""
        return self._reported(b"prompt_tokens") or 0

    @property
    def output_tokens(self) -> int:
        """Return the answer's tokens."""
        reported = self._reported(b"completion_tokens")
        return self._events if reported is None else reported

    @property
    def failed(self) -> bool:
        """Tell whether the stream ended with an error event."""
        return bool(_ERROR_EVENT.search(self._tail))

    def _reported(self, name: bytes) -> int | None:
        found = _COUNTS[name].findall(self._tail)
        return int(found[-1]) if found else None
