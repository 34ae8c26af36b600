"""A self-test on hosts of the lab: what is possible passes, and the check that should names a planted fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from powerband.testing.lab import host as lab
from support.model_configs import LLAMA_8B
from support.selftests import GB, H100, adopt, environment, planned_error, private, selftest


def test_all_checks_pass_and_the_bundle_improves_the_plan(tmp_path: Path) -> None:
    host = environment(tmp_path, H100 | {"count": 8, "island": 4})
    model = lab.sparse_model(tmp_path / "my-secret-model", LLAMA_8B, 16 * GB)
    code, checks, _, said = selftest(tmp_path, host, model, "--budget", "75s")
    assert code == 0, said
    assert {one["state"] for one in checks.values()} == {"passed"} and len(checks) == 11, said
    assert checks["placement"]["figures"] == {"replicas": 8, "devices": 8}
    assert checks["replicas"]["figures"]["replicas"] == 8
    levers = checks["levers"]["figures"]
    assert levers["tensor_parallel=8"] == levers["kv_cache=fp8"] == "read-back"
    text = (tmp_path / "selftest.json").read_text()
    assert not private(text, "my-secret-model", str(tmp_path)) and "/" not in text.replace("selftest/1", "")
    errors = checks["plan"]["figures"]
    assert errors["error_after"] < 0.15 < errors["error_before"]

    adopted = adopt(tmp_path, host)
    assert "rehearsed in the lab on NVIDIA H100 80GB HBM3, vllm 0.32.0" in Path(adopted["support"][0]).read_text()
    assert planned_error(host, model, "vllm", probe_s=8.0) < 0.15, "a plan on this machine uses the adopted rows"


def test_each_fault_is_named_by_its_check(tmp_path: Path) -> None:
    """One GPU of five is slow, one has processes of others, and one does not answer; the engine has two faults."""
    host = environment(
        tmp_path,
        H100 | {"count": 3, "slow": {2: 2.0}},
        H100 | {"used": 50 * GB},
        H100 | {"faults": {0: "lost"}},
        hidden_metrics=("vllm:num_preemptions_total",),
        ignored_options=("kv_cache_dtype",),
    )
    model = lab.sparse_model(tmp_path / "model", LLAMA_8B, 16 * GB)
    code, checks, _, said = selftest(tmp_path, host, model, "--budget", "60s")
    failed = {name: one["reason"] for name, one in checks.items() if one["state"] == "failed"}
    assert code == 4
    assert failed == {
        "detection": "GPU not answering",
        "free memory": "memory in use",
        "gauges": "gauge missing",
        "levers": "lever ignored",
        "replicas": "replicas unequal",
    }, said
    assert checks["gauges"]["figures"]["preemptions"] == "missing"
    assert checks["levers"]["figures"]["kv_cache=fp8"] == "ignored"
    assert checks["replicas"]["figures"]["slowest"] == "GPU-2"
    assert "GPU 4 does not answer" in said and "GPU 4" not in (tmp_path / "selftest.json").read_text()


def test_an_engine_that_dies_at_its_start(tmp_path: Path) -> None:
    host = environment(tmp_path, H100)
    model = lab.sparse_model(tmp_path / "model", LLAMA_8B, 16 * GB)
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(10 * GB)
    code, checks, _, said = selftest(tmp_path, host, model)
    assert code == 4
    assert (checks["start"]["state"], checks["start"]["failure"]) == ("failed", "corrupt_file"), said
    others = {checks[name]["state"] for name in ("memory", "plan", "gauges", "kill", "levers", "replicas")}
    assert others == {"not run"} and str(model) not in (tmp_path / "selftest.json").read_text()


def test_what_no_longer_fits_into_the_time_is_not_run(tmp_path: Path) -> None:
    host = environment(tmp_path, H100 | {"count": 2})
    model = lab.sparse_model(tmp_path / "model", LLAMA_8B, 16 * GB)
    code, checks, _, _ = selftest(tmp_path, host, model, "--budget", "1s")
    late = {name: one["reason"] for name, one in checks.items() if one["state"] == "not run"}
    assert code == 0 and late["replicas"] == late["levers"] == late["export"] == "out of time"


def test_without_a_model_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    home = environment(tmp_path, H100) | {"HF_HOME": str(tmp_path / "hf"), "POWERBAND_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "powerband", "selftest", "--engine", "vllm", "--json"]
    done = subprocess.run(argv, env=home, capture_output=True, text=True, check=False, cwd=tmp_path)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2 and "hf download" in error["hint"] and not (tmp_path / "selftest.json").exists()


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    """Only the check of GPU memory is not possible; times are shortened, and no catalogue row claims to know them."""
    spec = lab.HostSpec(name="server", cores=16, driver="")
    folder = lab.build(lab.Lab(hosts=(spec,), start_scale=0.02, time_scale=0.05, seed=7), tmp_path / "lab")["server"]
    model = lab.sparse_model(tmp_path / "model", LLAMA_8B, 16 * GB)
    code, checks, bundle, said = selftest(tmp_path, lab.environment(folder), model, "--budget", "30s")
    states = {name: one["state"] for name, one in checks.items()}
    assert code == 0 and states.pop("free memory") == "not possible", said
    assert set(states.values()) == {"passed"}, said
    assert bundle["machine"]["device"] == "this-machine" and "gpus" not in bundle["machine"]
    assert checks["replicas"]["figures"]["replicas"] == 2
