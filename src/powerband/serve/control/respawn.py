"""Keep a helper of the fleet alive: run it, and run it again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from powerband.core.engine import Command
from powerband.runtime.process import Process

_FIRST_PAUSE_S, _SETTLED_S = 0.05, 10.0


async def respawn(
    command: Command,
    *,
    log: Path,
    longest_pause_s: float,
    grace_s: float = 3.0,
    use: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run a command for ever, and beside it whatever uses it; who ends soon after its start waits longer each time."""
    pause_s = _FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        async with Process(command, log=log, grace_s=grace_s) as process:
            using = asyncio.ensure_future(use()) if use else None
            try:
                await process.ended.wait()
            finally:
                if using:
                    using.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await using
        settled = time.monotonic() - began > _SETTLED_S
        pause_s = _FIRST_PAUSE_S if settled else min(2 * pause_s, longest_pause_s)
        await asyncio.sleep(pause_s)
