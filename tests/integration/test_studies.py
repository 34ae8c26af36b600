"""A whole study of the golden server: search, a crashing lever, a kill and resume, validation, recipe and verify."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from powerband import serve
from powerband.bench import guards
from powerband.core.deployment import Deployment
from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.study import Study
from powerband.errors import InvalidMeasurement
from powerband.launchers import local
from powerband.reports import study as study_report
from powerband.store import documents
from powerband.tune import trial_runner
from powerband.tune.search import Step
from powerband.tune.spec import TuneSpec, make_runner
from support.studies import argv

pytestmark = pytest.mark.quiet


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tune, kill it in its second trial, and resume."""
    folder = tmp_path_factory.mktemp("tune")
    process = subprocess.Popen(argv(folder, "study"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = folder / "study" / "trials.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_text().count("\n")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    time.sleep(2)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=10)
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    first = journal.read_text()
    done = subprocess.run(argv(folder, "study", "--resume"), capture_output=True, text=True, check=False)
    if done.returncode == InvalidMeasurement.exit_code:
        pytest.skip("other work ran on this machine: no configuration could be measured")
    assert done.returncode == 0, done.stderr
    assert journal.read_text().startswith(first)
    return folder / "study"


def test_a_killed_study_resumes_and_ends_in_a_recipe(folder: Path) -> None:
    study, recipe = documents.read_as(Study, folder / "study.json"), documents.read_as(Recipe, folder / "recipe.yaml")
    assert [one.number for one in study.trials] == [1, 2, 3, 4][: len(study.trials)]  # fewer on a busy machine
    assert study.trials[0].settings == {"engine": "fake", "slots": "4", "itl": "20ms", "fault": "none"}
    assert recipe.promise.rate_per_s > 1
    assert recipe.validity["prompt_tokens"].low == 8
    assert set(recipe.evidence) >= {"study.json", "trials.jsonl", "validation.jsonl"}
    assert "golden" in recipe.command
    page = (folder / "report.html").read_text()
    assert recipe.summary in page and "All trials" in page


def test_the_page_shows_ablations_without_a_max_rate(folder: Path) -> None:
    study, recipe = documents.read_as(Study, folder / "study.json"), documents.read_as(Recipe, folder / "recipe.yaml")
    slow = BaselineComparison(name="one core instead of two", settings={}, max_rate_per_s=None, ratio=None)
    failed = slow.model_copy(update={"name": "one core instead of four", "why": "it died at its start"})
    page = study_report.page(study, recipe.model_copy(update={"ablation": (slow, failed)}), [])
    assert f"{slow.name}</td><td class='bar'></td><td>meets the SLO at no request rate" in page
    assert f"{failed.name}</td><td class='bar'></td><td>it died at its start" in page


def verified(recipe: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Verify a recipe; retry while background load of a shared machine makes the result undecided."""
    command = [sys.executable, "-m", "powerband", "verify", str(recipe), "--json", *more]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (5, 6):
            break
    return done


def test_verify_accepts_the_recipe_and_rejects_a_slower_one(folder: Path) -> None:
    holds = verified(folder / "recipe.yaml")
    assert holds.returncode == 0 and json.loads(holds.stdout)["found"] == "holds", holds.stdout
    slow = verified(folder / "recipe.yaml", "--set", "max_num_seqs=1")
    assert slow.returncode == 4, slow.stdout
    checks = json.loads(slow.stdout.splitlines()[0])["checks"]
    assert [one["promise"] for one in checks if one["found"] == "broken"] == ["SLO"]


@pytest.mark.parametrize(("promised", "found"), [(1.0, "holds"), (10_000.0, "broken")])
def test_a_closed_loop_recipe_is_verified_with_the_same_number_of_users(
    folder: Path, tmp_path: Path, promised: float, found: str
) -> None:
    recipe = documents.read_as(Recipe, folder / "recipe.yaml")
    changed = recipe.model_copy(
        update={
            "workload": recipe.workload.with_users(4),
            "promise": recipe.promise.model_copy(update={"rate_per_s": promised}),
        }
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(changed.to_text())
    done = verified(path)
    checks = {one["promise"]: one for one in json.loads(done.stdout.splitlines()[0])["checks"]}
    assert checks["SLO"]["found"] == found and "4 users" in checks["SLO"]["said"], done.stdout
    assert ("of the promised" in checks["SLO"]["said"]) == (found == "broken")


def test_a_study_is_not_overwritten(folder: Path) -> None:
    done = subprocess.run(argv(folder.parent, "study"), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--resume" in done.stderr


def test_a_study_with_another_slo_does_not_resume(folder: Path) -> None:
    before = (folder / "trials.jsonl").read_text()
    stricter = folder.parent / "stricter.yaml"
    stricter.write_text("powerband: slo/1\nttft: {p90: 200ms}\n")
    again = argv(folder.parent, "study", "--resume", "--slo", str(stricter))
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds trials with another SLO\n" in done.stderr, done.stderr
    assert (folder / "trials.jsonl").read_text() == before


async def test_only_the_screen_that_leads_gets_a_quality_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = documents.read_as(Study, folder / "study.json")
    runner = make_runner(TuneSpec("golden", study.workload, study.slo, engines=("fake",), requests=50), tmp_path)
    checked: list[dict[str, str]] = []

    async def quality_check(settings: dict[str, str], *_: object) -> dict[str, Any]:
        checked.append(settings)
        return {"passed": False, "outcome": "below the floor", "reason": "undecided: too few answers"}

    monkeypatch.setattr(runner, "quality_check", quality_check)
    assert study.best
    settings = study.best.settings
    behind = await runner.run_trial(Step(2, settings, None, None, climb=False, rival_value=1e9))
    assert behind.outcome == "screened" and not checked, "it cannot win"
    leads = await runner.run_trial(Step(3, settings, None, None, climb=False))
    assert leads.outcome == "below the floor" and leads.reason == "undecided: too few answers"
    assert checked == [settings]


async def test_building_a_variant_does_not_count_against_the_timeout(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = documents.read_as(Study, folder / "study.json")
    runner = make_runner(TuneSpec("golden", study.workload, study.slo, engines=("fake",)), tmp_path)
    own, settings = runner.deployment, study.trials[0].settings

    async def made(settings: dict[str, str]) -> Deployment[Any]:
        await asyncio.sleep(1)
        return await own(settings)

    monkeypatch.setattr(runner, "deployment", made)
    monkeypatch.setattr(trial_runner, "_MIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local, "start_timeout_s", lambda _: 3.0)
    runner.max_level_s = 0.1
    monkeypatch.setattr(runner, "measure_screen", lambda *_, **__: asyncio.sleep(30))
    found = await runner.run_trial(Step(1, settings, None, None, climb=True))
    assert found.outcome == "failed" and found.reason.startswith("timed out")
    assert found.excluded_s >= 1 and found.seconds >= found.excluded_s + 0.5


async def test_a_disturbed_trial_is_inconclusive(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = documents.read_as(Study, folder / "study.json")
    runner = make_runner(TuneSpec("golden", study.workload, study.slo, engines=("fake",)), tmp_path)
    monkeypatch.setattr(guards, "BACKGROUND_CPU", -1.0)
    found = await runner.run_trial(Step(1, study.trials[0].settings, None, None, climb=True))
    assert found.outcome == "inconclusive" and "background CPU load" in found.reason


async def test_drifted_traffic_is_tuned_for_while_the_fleet_is_idle(folder: Path, tmp_path: Path) -> None:
    parts, _ = serve.resolve(folder / "recipe.yaml")
    async with serve.fleet(parts, folder=tmp_path, capture=True) as fleet, httpx.AsyncClient(timeout=30) as http:
        await fleet.wait_until_ready(30)

        async def ask(count: int) -> None:
            for _ in range(count):
                chat = {"model": next(iter(parts)), "messages": [{"role": "user", "content": "much longer " * 40}]}
                answer = await http.post(f"{fleet.url}/v1/chat/completions", json={**chat, "max_tokens": 12})
                assert answer.status_code == 200, answer.text

        async def ask_for_the_trial() -> None:
            while True:
                if len({one["recipe"] for one in fleet.status()["replicas"]}) > 1:
                    await ask(1)
                else:  # idle, so that it tunes
                    await asyncio.sleep(0.5)

        async def verdict() -> dict[str, object]:
            words = ["observe", str(tmp_path), "--auto", "--json", "--every", "1s", "--idle", "2s"]
            argv = [sys.executable, "-m", "powerband", *words, "--budget", "100s", "--requests", "20"]
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            try:
                assert process.stdout
                found = json.loads(await process.stdout.readline())
                assert found["found"] == "drifted" and {one["axis"] for one in found["drifted"]} >= {"prompt", "output"}
                while not (event := json.loads(await process.stdout.readline())).keys() & {"promoted", "error"}:
                    pass
                return dict(event)
            finally:
                process.kill()
                await process.wait()

        await ask(150)
        asking = asyncio.create_task(ask_for_the_trial())
        try:
            async with asyncio.timeout(400):
                while "error" in (event := await verdict()):  # a machine too busy to measure; the same requests again
                    pass
        finally:
            asking.cancel()
        assert event["promoted"], event
        study = max(tmp_path.glob("*-retune"))
        workload = documents.read_as(Recipe, study / "recipe.yaml").workload
        assert workload.name == "captured"
