"""A study on a host of the lab: what cannot run is left out, and trials run side by side on devices of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from powerband.testing.lab import host as lab
from support.model_configs import LLAMA_8B, LLAMA_70B

GB = 10**9
SPEC = """
import asyncio, json, sys
from pathlib import Path
from powerband import SLO, Workload, tune
from powerband.tune import explore
from powerband.tune.spec import TuneSpec
workload = Workload.model_validate({"arrivals": {"process": "poisson", "rate_per_s": 1},
    "prompt": {"shape": "fixed", "tokens": 6000}, "output": {"shape": "fixed", "tokens": 8}})
slo = SLO.model_validate({"ttft": {"p50": "2s"}})
spec = TuneSpec(sys.argv[1], workload, slo, engines=("vllm",), schemes=("bf16",), requests=20, usd_per_h=2.0,
                budget_s=3600.0)
"""
EXPLORE = (
    SPEC
    + """
from dataclasses import replace
spec = replace(spec, max_trials=int(sys.argv[3]))
progress = tune.Progress(report=lambda line: print(line, flush=True))
_, study = asyncio.run(explore(spec, folder=Path(sys.argv[2]), progress=progress))
print(json.dumps({"defaults": study.defaults["vllm"], "trials": [one.model_dump(mode="json") for one in study.trials]}))
"""
)


SPACE = (
    SPEC
    + """
from powerband.tune.spec import make_runner
space = make_runner(spec, Path(sys.argv[2])).space
print(json.dumps({"defaults": space.all_defaults["vllm"], "why": next(iter(space.cannot_run.values()))}))
"""
)


def on_server(tmp_path: Path, script: str, config: dict[str, object], size: int, *arguments: str) -> str:
    """Run a script on a host of four GPUs, with a model and a folder; return what it printed."""
    spec = lab.HostSpec(name="server", devices=(lab.DeviceGroup(device="h100-sxm", count=4),), cores=64)
    folder = lab.build(lab.Lab(hosts=(spec,), time_scale=0.2), tmp_path / "lab")["server"]
    model = lab.sparse_model(tmp_path / "model", config, size)
    (tmp_path / "study").mkdir()
    argv = [sys.executable, "-c", script, str(model), str(tmp_path / "study"), *arguments]
    done = subprocess.run(argv, env=lab.environment(folder), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def explored(tmp_path: Path, config: dict[str, object], size: int, *, trials: int) -> tuple[dict[str, object], str]:
    *said, found = on_server(tmp_path, EXPLORE, config, size, str(trials)).splitlines()
    return dict(json.loads(found)), "\n".join(said)


def states(folder: Path) -> tuple[float, float, set[str]]:
    """Return when a trial's engine last started and stopped, and its devices."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    started = max(one["time"] for one in events if one["state"] == "starting")
    shown = (folder / "command.sh").read_text().partition("CUDA_VISIBLE_DEVICES=")[2].split()[0]
    return started, events[-1]["time"], set(shown.split(","))


def test_trials_run_side_by_side_on_devices_of_their_own(tmp_path: Path) -> None:
    found, said = explored(tmp_path, LLAMA_8B, 16 * GB, trials=5)
    trials = found["trials"]
    assert isinstance(trials, list) and len(trials) == 5
    assert {one["outcome"] for one in trials} <= {"screened", "feasible", "slower"}, [one["reason"] for one in trials]
    runs = [states(one) for one in sorted((tmp_path / "study").glob("trial-*"))]
    beside = [
        (one, other)
        for number, one in enumerate(runs)
        for other in runs[number + 1 :]
        if one[0] < other[1] and other[0] < one[1]
    ]
    assert beside and all(not one[2] & other[2] for one, other in beside)
    assert "trial 2: start the engine" in said


def test_defaults_that_do_not_fit_give_way_to_the_nearest_that_do(tmp_path: Path) -> None:
    done = on_server(tmp_path, SPACE, LLAMA_70B, 141 * GB)
    found = json.loads(done.splitlines()[-1])
    assert found["defaults"]["tensor_parallel"] == "2"
    assert "each GPU needs about" in found["why"]
