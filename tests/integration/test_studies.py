"""A whole study over the golden server: the search, a crash among its levers, the contest, the recipe, and a kill."""

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
from powerband.core.deployment import Deployment
from powerband.core.recipe import BaselineComparison, Recipe
from powerband.core.study import Study
from powerband.reports import study as study_report
from powerband.store import documents
from powerband.tune import trial_runner as trying
from powerband.tune.spec import TuneSpec, runner_of
from support.studies import argv

pytestmark = pytest.mark.quiet


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tune, kill it in its second trial, and go on."""
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
    assert done.returncode == 0, done.stderr
    assert journal.read_text().startswith(first)
    return folder / "study"


def test_a_killed_study_goes_on_and_ends_in_a_recipe(folder: Path) -> None:
    study, recipe = documents.of(Study, folder / "study.json"), documents.of(Recipe, folder / "recipe.yaml")
    assert [one.number for one in study.trials] == [1, 2, 3, 4][: len(study.trials)]  # fewer on a busy machine
    assert study.trials[0].settings == {"engine": "fake", "places": "4", "pace": "20ms", "fault": "none"}
    assert recipe.promise.rate_per_s > 1
    assert recipe.validity["prompt_tokens"].low == 8
    assert set(recipe.evidence) >= {"study.json", "trials.jsonl", "finals.jsonl"}
    assert "golden" in recipe.command
    page = (folder / "report.html").read_text()
    assert recipe.summary in page and "Everything that was tried" in page


def test_the_page_tells_levers_without_which_nothing_was_kept_or_known(folder: Path) -> None:
    study, recipe = documents.of(Study, folder / "study.json"), documents.of(Recipe, folder / "recipe.yaml")
    slow = BaselineComparison(name="one core instead of two", settings={}, max_rate_per_s=None, ratio=None)
    failed = slow.model_copy(update={"name": "one core instead of four", "why": "it died at its start"})
    page = study_report.page(study, recipe.model_copy(update={"ablation": (slow, failed)}), [])
    assert f"{slow.name}</td><td class='bar'></td><td>keeps the SLO at no rate" in page
    assert f"{failed.name}</td><td class='bar'></td><td>it died at its start" in page


def verified(recipe: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Prove a recipe again; a shared machine is not always quiet enough to say anything."""
    command = [sys.executable, "-m", "powerband", "verify", str(recipe), "--json", *more]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 3:
            break
    return done


def test_the_recipe_is_proven_again_and_a_slower_one_is_not(folder: Path) -> None:
    holds = verified(folder / "recipe.yaml")
    assert holds.returncode == 0 and json.loads(holds.stdout)["found"] == "holds", holds.stdout
    slow = verified(folder / "recipe.yaml", "--set", "max_num_seqs=1")
    assert slow.returncode == 4, slow.stdout
    checks = json.loads(slow.stdout.splitlines()[0])["checks"]
    assert [one["promise"] for one in checks if one["found"] == "broken"] == ["SLO"]


@pytest.mark.parametrize(("promised", "found"), [(1.0, "holds"), (10_000.0, "broken")])
def test_what_workers_are_answered_is_proven_by_as_many_workers(
    folder: Path, tmp_path: Path, promised: float, found: str
) -> None:
    recipe = documents.of(Recipe, folder / "recipe.yaml")
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
    assert ("is promised" in checks["SLO"]["said"]) == (found == "broken")


def test_a_study_is_not_written_over(folder: Path) -> None:
    done = subprocess.run(argv(folder.parent, "study"), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--resume" in done.stderr


def test_trials_of_another_question_are_not_gone_on_with(folder: Path) -> None:
    before = (folder / "trials.jsonl").read_text()
    stricter = folder.parent / "stricter.yaml"
    stricter.write_text("powerband: slo/1\nttft: {p90: 200ms}\n")
    again = argv(folder.parent, "study", "--resume", "--slo", str(stricter))
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds trials with another SLO\n" in done.stderr, done.stderr
    assert (folder / "trials.jsonl").read_text() == before


async def test_what_would_lead_the_search_passes_the_whole_gate_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = documents.of(Study, folder / "study.json")
    rig = runner_of(TuneSpec("golden", study.workload, study.slo, engines=("fake",), requests=50), tmp_path)
    asked = []

    async def objection(settings: dict[str, str]) -> str:
        asked.append(settings)
        return "undecided: too few answers"

    monkeypatch.setattr(rig, "objection", objection)
    known = study.trials[0]
    assert known.max_rate_per_s
    behind = known.model_copy(update={"max_rate_per_s": 0.5 * known.max_rate_per_s})
    found = await rig.attempt(2, known.settings, expected=None, best=behind)
    assert found.outcome == "below the floor" and found.reason == "undecided: too few answers"
    assert asked == [known.settings]


async def test_a_variant_that_takes_long_to_make_is_not_a_trial_that_takes_long(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = documents.of(Study, folder / "study.json")
    rig = runner_of(TuneSpec("golden", study.workload, study.slo, engines=("fake",)), tmp_path)
    own, settings = rig.deployment, study.trials[0].settings

    async def made(settings: dict[str, str]) -> Deployment[Any]:
        await asyncio.sleep(1)
        return await own(settings)

    monkeypatch.setattr(rig, "deployment", made)
    monkeypatch.setattr(trying, "_LONGEST_S", 0.5)
    rig.longest_s = 0.1
    monkeypatch.setattr(rig, "climb", lambda *_, **__: asyncio.sleep(30))
    found = await rig.attempt(1, settings, expected=None, best=None)
    assert found.outcome == "failed" and found.reason.startswith("it did not come to an end")
    assert found.excluded_s >= 1 and found.seconds >= found.excluded_s + 0.5


async def test_changed_traffic_is_tuned_for_while_nobody_asks(folder: Path, tmp_path: Path) -> None:
    parts, _ = serve.resolve(folder / "recipe.yaml")
    async with serve.fleet(parts, folder=tmp_path, capture=True) as fleet, httpx.AsyncClient(timeout=30) as http:
        await fleet.ready(30)

        async def ask(count: int) -> None:
            for _ in range(count):
                chat = {"model": next(iter(parts)), "messages": [{"role": "user", "content": "much longer " * 40}]}
                answer = await http.post(f"{fleet.url}/v1/chat/completions", json={**chat, "max_tokens": 12})
                assert answer.status_code == 200, answer.text

        async def ask_for_the_trial() -> None:
            while True:
                if len({one["recipe"] for one in fleet.status()["replicas"]}) > 1:
                    await ask(1)
                else:  # nobody asks, so it tunes
                    await asyncio.sleep(0.5)

        async def verdict() -> dict[str, object]:
            words = ["observe", str(tmp_path), "--auto", "--json", "--every", "1s", "--idle", "2s"]
            argv = [sys.executable, "-m", "powerband", *words, "--budget", "60s", "--requests", "20"]
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            try:
                assert process.stdout
                found = json.loads(await process.stdout.readline())
                assert found["found"] == "drifted" and {one["axis"] for one in found["drifted"]} >= {"prompt", "output"}
                while not (told := json.loads(await process.stdout.readline())).keys() & {"promoted", "error"}:
                    pass
                return dict(told)
            finally:
                process.kill()
                await process.wait()

        await ask(150)
        asking = asyncio.create_task(ask_for_the_trial())
        try:
            async with asyncio.timeout(400):
                while "error" in (told := await verdict()):  # a machine too busy to measure; the same requests again
                    pass
        finally:
            asking.cancel()
        assert told["promoted"], told
        study = max(tmp_path.glob("*-retune"))
        workload = documents.of(Recipe, study / "recipe.yaml").workload
        assert workload.name == "captured"
