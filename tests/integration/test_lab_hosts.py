"""Powerband finds itself on a host of the lab, and leases keep two processes apart."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband.core.allocation import Need, NoRoom
from powerband.runtime import devices, leases
from powerband.testing.lab import host as lab
from powerband.testing.lab.world import LabHost

GIB = 2**30


def built(tmp_path: Path, *groups: dict[str, Any], **more: Any) -> Path:
    spec = lab.HostSpec(name="one", devices=tuple(groups), **more)
    return lab.build(lab.Lab(hosts=(spec,), seed=7), tmp_path / "lab")["one"]


def doctor(host: Path, **variables: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "powerband", "doctor", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=lab.environment(host) | variables, check=False)
    return dict(json.loads(done.stdout))


def test_a_host_with_eight_gpus(tmp_path: Path) -> None:
    host = built(tmp_path, {"device": "h100-sxm", "count": 8, "island": 4}, cores=96, threads_per_core=2, numa_nodes=2)
    found = doctor(host)["host"]
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 8
    assert [gpu["island"] for gpu in found["gpus"]] == [0] * 4 + [4] * 4
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [0] * 4 + [1] * 4
    assert len(found["cores"]) == 192 and len(found["core_threads"]) == 96
    assert found["core_threads"][3] == [3, 99]
    assert found["numa_nodes"][1]["cores"][:2] == [48, 49]


def test_claimed_memory_is_not_free(tmp_path: Path) -> None:
    host = built(tmp_path, {"device": "h100-sxm", "count": 2})
    world = LabHost(host)
    world.claim(world.devices[1], 50 * GIB)
    free = [gpu["free_bytes"] for gpu in doctor(host)["host"]["gpus"]]
    assert free[0] - free[1] == 50 * GIB
    ended = subprocess.Popen(["true"])
    ended.wait()
    world.claim(world.devices[0], 10 * GIB, pid=ended.pid)
    assert doctor(host)["host"]["gpus"][0]["free_bytes"] == free[0], "a claim ends with its process"


def test_amd_gpus_are_read_from_sysfs(tmp_path: Path) -> None:
    host = built(tmp_path, {"device": "mi300x", "count": 8}, numa_nodes=2)
    gpus = doctor(host)["host"]["gpus"]
    assert {gpu["vendor"] for gpu in gpus} == {"amd"} and len(gpus) == 8
    assert gpus[0]["name"] == "AMD Instinct MI300X" and gpus[0]["compute_capability"] == "gfx942"
    assert {gpu["island"] for gpu in gpus} == {0}, "XGMI connects all of them"
    assert [gpu["index"] for gpu in doctor(host, HIP_VISIBLE_DEVICES="6,2")["host"]["gpus"]] == [6, 2]


def test_two_processes_never_hold_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = built(tmp_path, {"device": "h100-sxm", "count": 2})
    ask = "import json,sys; from powerband.runtime import devices,leases; from powerband.core.allocation import Need\n"
    ask += "lease = leases.acquire(devices.this_host(), Need(devices=1), name='first')\n"
    ask += "print(lease.allocation.gpus[0].index, flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", ask], env=lab.environment(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout and other.stdin and other.stdout.readline() == "0\n"
    show = "from powerband.runtime import devices,leases; from powerband.core.allocation import Need\n"
    show += "host = devices.this_host(); print(leases.held(host))\n"
    show += "with leases.acquire(host, Need(devices=1)) as own:\n"
    show += "    print(own.allocation.gpus[0].index)\n"
    show += "    try: leases.acquire(host, Need(devices=1))\n"
    show += "    except Exception as error: print(type(error).__name__, error)\n"
    done = subprocess.run([sys.executable, "-c", show], env=lab.environment(host), capture_output=True, text=True)
    held, index, refused = done.stdout.splitlines()
    assert f"{other.pid} first" in held and index == "1" and refused.startswith("NoRoom"), done.stderr
    other.kill()
    other.communicate()
    again = subprocess.run([sys.executable, "-c", show], env=lab.environment(host), capture_output=True, text=True)
    assert again.stdout.splitlines()[:2] == ["{}", "0"], "the lease ended with its process"


def test_a_lease_lasts_until_the_keeper_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The keeper inherits the locks: cores are not free while an engine of a dead Powerband still runs."""
    monkeypatch.setenv("POWERBAND_SYSTEM_ROOT", str(built(tmp_path, cores=2) / "system"))
    host, need = devices.this_host(), Need(cores=2)
    lease = leases.acquire(host, need)
    child = subprocess.Popen(["sleep", "60"], pass_fds=lease.descriptors)
    lease.__exit__(None, None, None)
    assert set(leases.held(host)) == {"core-0", "core-1"}
    assert leases.acquire(host, need).allocation.cores == (), "it shares all cores instead"
    child.kill()
    child.wait()
    assert not leases.held(host)


def test_a_missing_device_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POWERBAND_SYSTEM_ROOT", str(built(tmp_path) / "system"))
    with pytest.raises(NoRoom):
        leases.acquire(devices.this_host(), Need(devices=1))
    assert "POWERBAND_LAB" not in os.environ


def test_a_deployment_that_does_not_fit_a_gpu_is_refused(tmp_path: Path) -> None:
    """The error names the GPU and its free memory."""
    host = built(tmp_path, {"device": "h100-sxm", "count": 2})
    facts = {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192, "vocab_size": 128256}
    model = lab.sparse_model(tmp_path / "model", facts, 141 * 10**9)  # Llama-3.1-70B in bf16
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    argv = [sys.executable, "-m", "powerband", "run", str(model), "--engine", "vllm", "--dry-run", "--json"]
    argv += ["--engine-path", str(python)]
    done = subprocess.run(argv, capture_output=True, text=True, env=lab.environment(host), check=False)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert "GPU 0 (NVIDIA H100 80GB HBM3) has 79.6 GiB free" in error["message"]
    assert "tensor_parallel_size" in error["hint"]
