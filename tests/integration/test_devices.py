"""Hardware detection, from kernel files and through the NVML binding."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband.runtime import devices

HERE = Path(__file__).parent


def doctor(env: dict[str, str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "powerband", "doctor", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **env})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler for the NVML stub")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(HERE / "nvml.c")], check=True)
    return folder


def test_gpus_are_read_through_nvml(nvml: Path) -> None:
    gpus = doctor({"LD_LIBRARY_PATH": str(nvml)})["host"]["gpus"]
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert {gpu["driver"] for gpu in gpus} == {"550.90.07"}
    assert [gpu["free_bytes"] >> 20 for gpu in gpus] == [81558, 11559]
    assert gpus[0]["compute_capability"] == "9.0"


def test_a_deployment_that_does_not_fit_a_gpu_is_refused(nvml: Path, tmp_path: Path) -> None:
    """The error names the GPU and its free memory."""
    model = tmp_path / "model"
    model.mkdir()
    facts = {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192, "vocab_size": 128256}
    (model / "config.json").write_text(json.dumps(facts))
    with (model / "model.safetensors").open("wb") as stream:
        stream.truncate(141 * 10**9)  # a sparse file of the size of Llama-3.1-70B in bf16
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    argv = [sys.executable, "-m", "powerband", "run", str(model), "--engine", "vllm", "--dry-run", "--json"]
    argv += ["--engine-path", str(python)]
    env = {**os.environ, "LD_LIBRARY_PATH": str(nvml)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert "GPU 0 (NVIDIA H100 80GB HBM3) has 79.6 GiB free" in error["message"]
    assert "tensor_parallel_size" in error["hint"]


def test_a_machine_without_a_driver_has_no_gpu_problem() -> None:
    host = doctor({"LD_LIBRARY_PATH": "/nowhere"})["host"]
    assert host["gpu_problem"] is None


def test_cores_and_memory_match_the_kernel() -> None:
    host = devices.this_host()
    assert len(host.cores) == len(os.sched_getaffinity(0))
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert host.memory_bytes <= total_kib * 1024
    assert 0 < host.available_bytes <= host.memory_bytes
    assert sum(node.memory_bytes for node in host.numa_nodes) <= total_kib * 1024 * 1.01


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        ({"memory.max": "4294967296", "memory.current": "1073741824"}, 4 * 2**30, 3 * 2**30),
        ({"memory.limit_in_bytes": "4294967296", "memory.usage_in_bytes": "0"}, 4 * 2**30, 4 * 2**30),
        ({"memory.max": "max", "memory.current": "5"}, None, None),
        ({"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}, None, None),
    ],
)
def test_a_cgroup_limits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None, free: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(devices, "_cgroup_folders", lambda: [tmp_path])
    host = devices.this_host()
    assert host.memory_limit_bytes == limit
    if free is not None:
        assert host.available_bytes <= free and host.memory_bytes <= 4 * 2**30
