"""A recipe of a GPU server on a host of the lab: `verify` counts its devices, and a fleet's replica reports its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from powerband.testing.lab import host as lab
from support.model_configs import LLAMA_8B
from support.recipes import recipe

WEIGHT_BYTES = 16 * 10**9
RUN_A_SLOT = """
import asyncio, json, sys
from pathlib import Path
from powerband import engines
from powerband.serve.control.replica_slot import ReplicaSlot

class Spec:
    recipe = "a recipe"
    ttft_s = usd_per_h = weights_bytes = kv_bytes = None
    def deployment(self):
        return engines.deployment_of(json.loads(sys.argv[2]))

async def main():
    ready = asyncio.Event()
    slot = ReplicaSlot("one", "pool", Spec(), Path(sys.argv[1]), on_ray=False, on_change=ready.set)
    before = slot.status()
    running = asyncio.create_task(slot.run())
    await ready.wait()
    print(json.dumps([before, slot.status()]))
    await slot.stop()
    await running

asyncio.run(main())
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    spec = lab.HostSpec(name="server", devices=(lab.DeviceGroup(device="h100-sxm", count=2),), cores=16)
    return lab.build(lab.Lab(hosts=(spec,), time_scale=0.05), tmp_path / "lab")["server"]


@pytest.mark.parametrize("verb", ["verify", "serve"])
def test_a_host_with_fewer_gpus_is_refused(host: Path, tmp_path: Path, verb: str) -> None:
    devices = {"gpus": 4, "device_vendor": "nvidia", "device_name": "NVIDIA H100 80GB HBM3"}
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe("vllm", tensor_parallel_size=4).model_copy(update=devices).to_text())
    argv = [sys.executable, "-m", "powerband", verb, str(path), *(["--json"] if verb == "verify" else [])]
    done = subprocess.run(argv, env=lab.environment(host), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "2 of the 2 visible GPUs" in done.stdout + done.stderr


def test_the_status_of_a_replica_has_its_gpus(host: Path, tmp_path: Path) -> None:
    data = {
        "powerband": "deployment/1",
        "name": "llama",
        "engine": "vllm",
        "variant": {"source": str(lab.sparse_model(tmp_path / "model", LLAMA_8B, WEIGHT_BYTES))},
        "config": {"tensor_parallel_size": 2, "max_model_len": 4096},
    }
    argv = [sys.executable, "-c", RUN_A_SLOT, str(tmp_path / "fleet"), json.dumps(data)]
    done = subprocess.run(argv, env=lab.environment(host), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, ready = json.loads(done.stdout)
    assert (before["gpus"], ready["gpus"]) == ([], [0, 1])
