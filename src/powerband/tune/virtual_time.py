"""Run asyncio code in virtual time: when every task waits, the clock jumps to the next deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose sleeps take no time; `asyncio.get_running_loop().time()` counts from 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    """Polls instead of waiting, and moves the clock by the time that it would have waited."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout and 0)
        if not found and timeout:
            self._loop.now_s += timeout
        return found
