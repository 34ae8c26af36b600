"""Start and stop replicas on a host of the lab as Powerband does; commands come in on stdin, one JSON line each.

A replica is a sleeping process with real leases, a real keeper and the environment of an engine. `hosts` moves the worker
to another host: everything that describes the machine is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from powerband.core.allocation import Need, NoRoom
from powerband.core.engine import Command
from powerband.errors import InputError
from powerband.runtime import devices, gpus, leases
from powerband.runtime.process import Process
from powerband.testing.lab import host as lab


class Worker:
    """The running replicas of one Powerband process."""

    def __init__(self) -> None:
        self.running: dict[str, contextlib.AsyncExitStack] = {}
        self.processes: dict[str, Process] = {}

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command, and return what happened."""
        action, name = command["do"], command.get("name", "")
        if action == "host":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ.update(lab.environment(Path(command["folder"])) | command["environment"])
            return {}
        if action == "start":
            return await self.start(name, Need(**command["need"]))
        if action == "wait_ended":  # the engine was killed
            await self.processes[name].exited.wait()
        await self.running.pop(name).aclose()
        return {}

    async def start(self, name: str, need: Need) -> dict[str, Any]:
        """Place a replica and start its process."""
        stack = contextlib.AsyncExitStack()
        try:
            host = devices.this_host()
            lease = stack.enter_context(leases.acquire(host, need, name=name))
        except NoRoom as error:
            return {"refused": error.message, "hint": error.hint}
        except InputError as error:
            return {"invalid": error.message}
        command = Command(argv=("sleep", "600"), env=gpus.selection(lease.allocation.gpus))
        log = Path(os.environ["POWERBAND_STATE"]) / f"{name}.log"
        process = Process(command, log=log, grace_s=0.5, inherited=lease.descriptors)
        await stack.enter_async_context(process)
        self.running[name], self.processes[name] = stack, process
        return {"pid": process.pid, "uuids": [gpu.id for gpu in lease.allocation.gpus]}


async def main() -> None:
    """Answer commands until stdin closes."""
    worker, loop = Worker(), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await worker.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
