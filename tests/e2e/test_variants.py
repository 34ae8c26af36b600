"""Variants made of a real model, served by a real engine and judged against the original."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from powerband.runtime import installations
from support import models

pytestmark = pytest.mark.llamacpp
KNOBS = "{parallel: 4, ctx_size: 8192, cache_ram: 0}"
FLOOR = """powerband: quality/1
name: quick
fidelity: {kl_mean: "<= 0.05", top1_agreement: ">= 0.85"}
tasks: {recall: {recovery: ">= 0.6"}}
"""


def powerband(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "powerband", *args], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make three variants, and a deployment of each."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "floor.yaml").write_text(FLOOR)
    source = models.make_all().safetensors
    schemes = ("f16", "q8_0", "q2_k")
    done = powerband("quantize", str(source), *(word for one in schemes for word in ("--scheme", one)), "--json")
    assert done.returncode == 0, done.stderr
    for one in json.loads(done.stdout):
        assert one["bytes"] > 50e6 and one["tools"]["llamacpp"] and one["calibration"]["samples"] >= 128
        text = f"powerband: deployment/1\nengine: llamacpp\nvariant: {{source: {one['path']}}}\nconfig: {KNOBS}\n"
        (folder / f"{one['scheme']}.yaml").write_text(text)
    return folder


def judged(folder: Path, scheme: str) -> tuple[int, dict[str, object]]:
    output = folder / f"judged-{scheme}"
    done = powerband("evaluate", f"{folder / scheme}.yaml", "--reference", f"{folder / 'f16'}.yaml", "--refresh",
                     "--quality", str(folder / "floor.yaml"), "--samples", "8", "--questions", "40", "--reserve", "0s",
                     "--output", str(output))  # fmt: skip
    assert (output / "evaluation.html").is_file(), done.stderr
    return done.returncode, json.loads((output / "evaluation.json").read_text())


def test_a_killed_job_leaves_no_variant_and_no_process() -> None:
    """Killed while the tool writes; the folder of variants then holds nothing that looks like one."""
    home = installations.cache_root() / "variants"
    before = set(home.glob("*"))
    argv = [sys.executable, "-m", "powerband", "quantize", str(models.make_all().safetensors), "--scheme", "q4_0"]
    words = ["--samples", str(random.randint(20, 120))]  # so that nobody has made it
    job = subprocess.Popen([*argv, *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not set(home.glob("*.partial")) - before:
        assert job.poll() is None
        time.sleep(0.05)
    children = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.wait()
    assert not psutil.wait_procs(children, timeout=10)[1]
    for one in set(home.glob("*")) - before:
        assert one.suffix == ".partial" or not (one / "variant.yaml").exists()
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def test_eight_bits_pass(made: Path) -> None:
    code, found = judged(made, "q8_0")
    assert (code, found["verdict"]) == (0, "pass"), found["reason"]


def test_two_bits_fail_and_the_exit_code_says_so(made: Path) -> None:
    code, found = judged(made, "q2_k")
    assert (code, found["verdict"]) == (4, "fail"), found["reason"]
    assert found["stopped_early"]
