"""The outer process of a fleet: it restarts the supervisor, and keeps what must live on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from powerband.runtime import keeper
from powerband.runtime.descriptor_store import DescriptorStore

_DRAIN_S = 600.0  # for requests in flight, when the fleet stops
_MIN_BACKOFF_S, _MAX_BACKOFF_S, _BACKOFF_RESET_S = 0.05, 1.0, 2.0  # meanwhile nobody sees a dead replica


async def run_supervisor(folder: Path) -> None:
    """Run a fleet's supervisor until cancelled, then let it finish the running requests and stop everything.

    The supervisor has no keeper, which would end its engines with it. It dies with this process, and so do they: this
    process has the last copies of their control sockets.
    """
    store, backoff_s = DescriptorStore(), _MIN_BACKOFF_S
    loop = asyncio.get_running_loop()
    try:
        while True:
            began = loop.time()
            process = _start(folder, store)
            try:
                await asyncio.to_thread(process.wait)
            except asyncio.CancelledError:
                process.terminate()
                await _ended(process)
                raise
            backoff_s = _MIN_BACKOFF_S if loop.time() - began > _BACKOFF_RESET_S else min(2 * backoff_s, _MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)
    finally:
        store.close()


def _start(folder: Path, store: DescriptorStore) -> subprocess.Popen[bytes]:
    with store.connect() as connection, (folder / "supervisor.log").open("ab") as log:
        argv = [sys.executable, "-m", "powerband.serve.control.supervisor", str(folder), str(connection.fileno())]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[connection.fileno()],
            start_new_session=True,
            preexec_fn=keeper.die_with(os.getpid()),
        )


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a supervisor that finishes its requests; kill it if that takes too long."""
    waiting = asyncio.ensure_future(asyncio.to_thread(process.wait))
    done, _ = await asyncio.wait([waiting], timeout=_DRAIN_S)
    if not done:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await waiting
