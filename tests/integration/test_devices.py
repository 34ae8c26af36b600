"""Hardware detection from kernel files; GPUs are in test_lab_hosts.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband.runtime import devices


def doctor(env: dict[str, str]) -> dict[str, Any]:
    argv = [sys.executable, "-m", "powerband", "doctor", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **env})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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
