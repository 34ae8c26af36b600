"""Run a process, and restart it whenever it exits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from powerband.core.engine import Command
from powerband.runtime.descriptor_store import StoredDescriptors, StoredProcess
from powerband.runtime.process import Process

_MIN_BACKOFF_S, _BACKOFF_RESET_S = 0.05, 10.0


async def respawn(
    command: Command,
    *,
    log: Path,
    max_backoff_s: float,
    grace_s: float = 3.0,
    store: StoredDescriptors,
    stored: StoredProcess | None = None,
) -> None:
    """Run a command until cancelled; restart it with exponential back-off.

    The `store` keeps the process for another supervisor, which takes it over as `stored`.
    """
    backoff_s = _MIN_BACKOFF_S
    while True:
        began = time.monotonic()
        starting = await Process.adopt(*stored) if stored else Process(command, log=log, grace_s=grace_s)
        stored = None
        async with starting as process, contextlib.AsyncExitStack() as stack:
            store.keep(log.stem, process.record, process.control)
            stack.callback(store.drop, log.stem)
            await process.exited.wait()
        settled = time.monotonic() - began > _BACKOFF_RESET_S
        backoff_s = _MIN_BACKOFF_S if settled else min(2 * backoff_s, max_backoff_s)
        await asyncio.sleep(backoff_s)
