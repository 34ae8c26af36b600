"""What the proofs of placement share: fleets on simulated hosts, their devices, and users that send requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prelude import say

import httpx
import psutil

from powerband.serve import Fleet
from powerband.serve.spec import FleetSpec
from powerband.testing.lab.world import LabHost

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LARGE = SMALL | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 28672}
SCALE, READY_S = 0.02, 180
_USERS = 12
_ACTOR = "DeviceActor"  # in the title of a process that holds a device for a replica over several nodes

Held = dict[str, list[str]]  # devices by replica


def deployment(home: Path, name: str, model: Path, tensor: int, **config: Any) -> str:
    """Write a deployment; return its path."""
    config = {"tensor_parallel_size": tensor, "max_model_len": 8192} | config
    data = {"powerband": "deployment/1", "name": name, "variant": {"source": str(model)}, "engine": "vllm"}
    (home / f"{name}.json").write_text(json.dumps({**data, "config": config}))
    return f"{name}.json"


@contextlib.asynccontextmanager
async def serving(home: Path, models: dict[str, Any], environment: dict[str, str], *options: str) -> AsyncIterator[Fleet]:  # fmt: skip
    """Run `powerband serve` on a host until all replicas are ready."""
    path, folder = home / "fleet.json", home / f"run-{time.monotonic_ns()}"
    path.write_text(json.dumps({"powerband": "fleet/1", "models": models}))
    argv = [sys.executable, "-m", "powerband", "serve", str(path), "--run-dir", str(folder), "--json", *options]
    with (home / "serve.log").open("w") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + READY_S
        while not (folder / "spec.json").exists() and process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.1)
        if process.poll() is not None:
            raise SystemExit((home / "serve.log").read_text()[-2000:])
        fleet = Fleet(FleetSpec.read(folder), folder)
        await fleet.wait_until_ready(READY_S)
        yield fleet
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def holdings(fleet: Fleet, hosts: Sequence[LabHost]) -> Held:
    """Return the devices of each ready replica, by the memory that its processes hold."""
    holders = {
        f"{host.name}:{gpu.index}" if len(hosts) > 1 else str(gpu.index): set(host.holders(gpu))
        for host in hosts
        for gpu in host.devices
    }
    found: Held = {}
    for one in fleet.status()["replicas"]:
        if not one["pid"]:
            continue
        with contextlib.suppress(psutil.Error):
            engine = psutil.Process(one["pid"])
            pids = {engine.pid, *(child.pid for child in engine.children(recursive=True))}
            if fleet.spec.models[one["model"]].over_nodes:
                pids = {pid for own in holders.values() for pid in own if _ACTOR in _title(pid)}
            found[one["name"]] = [name for name, own in holders.items() if pids & own]
    return found


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


@contextlib.asynccontextmanager
async def loaded(fleet: Fleet) -> AsyncIterator[dict[str, int]]:
    """Send requests to all models; yield the numbers of answers by their status, complete at the end."""
    counts: dict[str, int] = {}
    stop = asyncio.Event()

    async def user(http: httpx.AsyncClient, number: int) -> None:
        names = list(fleet.spec.models)
        for turn in itertools.count():
            if stop.is_set():
                return
            prompt = f"user {number} turn {turn} " * 20
            body = {"model": names[(number + turn) % len(names)], "prompt": prompt, "max_tokens": 30}
            try:
                status = str((await http.post("/v1/completions", json=body)).status_code)
            except httpx.HTTPError:
                status = "broken"
            counts[status] = counts.get(status, 0) + 1
            if status != "200":
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(base_url=fleet.url, trust_env=False, timeout=60) as http:
        users = [asyncio.create_task(user(http, number)) for number in range(_USERS)]
        try:
            yield counts
        finally:
            stop.set()
            await asyncio.gather(*users)
    say(f"  answers by status: {dict(sorted(counts.items()))}")


def table(moment: str, held: Held) -> None:
    """Print the devices of each replica."""
    say(f"  {moment:22} {'  '.join(f'{name} [{_short(own)}]' for name, own in sorted(held.items()))}")


def _short(names: Sequence[str]) -> str:
    """Return device names, by host if there are several."""
    hosts = itertools.groupby(names, lambda one: one.rpartition(":")[0])
    return "; ".join(
        f"{host}: {', '.join(one.rpartition(':')[2] for one in own)}" if host else ", ".join(own) for host, own in hosts
    )


def no_device_twice(held: Held) -> bool:
    """Return whether no device has two replicas."""
    devices = [device for own in held.values() for device in own]
    return len(devices) == len(set(devices))


def right(held: Held, sizes: dict[str, int], wanted: int) -> bool:
    """Return whether all replicas run, each on as many devices as it needs, which no other holds."""
    sized = all(len(own) == sizes[name.rpartition("-")[0]] for name, own in held.items())
    return len(held) == wanted and sized and no_device_twice(held)


async def back(fleet: Fleet, hosts: Sequence[LabHost], sizes: dict[str, int], wanted: int) -> tuple[bool, float]:
    """Wait until all replicas run again; return whether no device had two replicas meanwhile, and the seconds."""
    began, good = time.monotonic(), True
    while time.monotonic() < began + READY_S:
        held = holdings(fleet, hosts)
        good = good and no_device_twice(held)
        if right(held, sizes, wanted):
            break
        await asyncio.sleep(0.2)
    held = holdings(fleet, hosts)
    table("back", held)
    return good and right(held, sizes, wanted), time.monotonic() - began
