"""A rollout on a host of the lab whose devices are all in use: old replicas give way, one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband.testing.lab import host as lab
from support.model_configs import LLAMA_1B

pytest.importorskip("grpc")

ROLL_OUT = """
import asyncio, json, sys
from pathlib import Path
import httpx
from powerband import rollout, serve

home, replicas = Path(sys.argv[1]), int(sys.argv[2])
fleet_file = {"powerband": "fleet/1", "models": {"llama": {"recipe": "old.json", "replicas": replicas}}}
(home / "fleet.json").write_text(json.dumps(fleet_file))

async def main():
    models, tenants = serve.resolve(home / "fleet.json")
    (home / "run").mkdir()
    async with serve.fleet(models, tenants=tenants, folder=home / "run") as fleet:
        await fleet.wait_until_ready(60)
        stop, codes, least, seen = asyncio.Event(), set(), replicas, []

        async def user():
            async with httpx.AsyncClient(base_url=fleet.url, trust_env=False, timeout=30) as http:
                while not stop.is_set():
                    body = {"model": "llama", "prompt": "a b c", "max_tokens": 4}
                    codes.add((await http.post("/v1/completions", json=body)).status_code)

        users = [asyncio.create_task(user()) for _ in range(2)]
        task = asyncio.create_task(rollout.rollout(fleet.folder, home / "new.json", canary_weight=0.5, requests=10,
                                                   timeout_s=60))
        while not task.done():
            await asyncio.sleep(0.05)
            now = [(one["name"], one["recipe"], one["state"]) for one in fleet.status()["replicas"]]
            seen += [now] if now not in seen[-1:] else []
            least = min(least, sum(state == "ready" for _, _, state in now))
        await asyncio.sleep(1)
        stop.set()
        await asyncio.gather(*users)
        found, states = await task, [(one["recipe"], one["state"]) for one in fleet.status()["replicas"]]
        print(json.dumps([found.promoted, found.reason, sorted(codes), [least, seen], sorted(states)]))

asyncio.run(main())
"""


def rolled_out(tmp_path: Path, replicas: int) -> list[Any]:
    """Run the rollout on a host with as many devices as replicas; return what it printed."""
    spec = lab.HostSpec(name="server", devices=(lab.DeviceGroup(device="h100-sxm", count=replicas),), cores=16)
    host = lab.build(lab.Lab(hosts=(spec,), time_scale=0.02), tmp_path / "lab")["server"]
    model = lab.sparse_model(tmp_path / "model", LLAMA_1B, 2_470_000_000)
    for name, sequences in (("old", 64), ("new", 128)):
        data = {
            "powerband": "deployment/1",
            "name": "llama",
            "engine": "vllm",
            "variant": {"source": str(model)},
            "config": {"max_model_len": 4096, "max_num_seqs": sequences},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    argv = [sys.executable, "-c", ROLL_OUT, str(tmp_path), str(replicas)]
    done = subprocess.run(argv, env=lab.environment(host), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_old_replicas_give_way_one_at_a_time(tmp_path: Path) -> None:
    promoted, reason, codes, (least, seen), states = rolled_out(tmp_path, 3)
    assert promoted, reason
    assert codes == [200] and least == 2, seen
    assert states == 3 * [["llama (new)", "ready"]]


def test_the_last_replica_does_not_give_way(tmp_path: Path) -> None:
    promoted, reason, codes, (least, seen), states = rolled_out(tmp_path, 1)
    assert not promoted and "no device is free for the canary" in str(reason)
    assert codes == [200] and least == 1 and states == [["llama", "ready"]], seen
