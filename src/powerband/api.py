"""The blocking forms of the stages, for scripts and notebooks: `powerband.plan(...)`, `powerband.tune(...)`, ..."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from powerband import aio

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Return the blocking form; inside a running event loop, as in a notebook, it runs in a thread."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(function(*args, **kwargs))
        results: list[R] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(asyncio.run(function(*args, **kwargs)))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return call


plan = _blocking(aio.plan)
bench = _blocking(aio.bench)
evaluate = _blocking(aio.evaluate)
tune = _blocking(aio.tune)
verify = _blocking(aio.verify)
