"""The instrument against a server whose truth is known, and the ways in which a run can end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from powerband.core.measurement import Measurement
from powerband.store import documents, records
from support import faults
from support.golden import golden

pytestmark = pytest.mark.quiet

FAKE = ("--engine", "fake", "--set", "ttft_s=50ms", "--set", "itl_s=10ms")


def test_the_truth_of_a_golden_server() -> None:
    workload = faults.CHAT.replace("poisson, rate_per_s: 40", "closed, users: 64")
    errors = []
    for _ in range(3):  # a hiccup of a shared machine only ever adds to the error
        with golden(itl_us=20_000) as server:
            outcome = faults.bench(server.url, "--duration", "4s", "--force", workload=workload)
            server.end()
            truth = [(token - read) / 1e9 for read, token, _, _ in server.requests()]
        level = outcome.measurement["levels"][0]
        errors.append(level["latencies"]["ttft"]["mean"]["value"] - sum(truth) / len(truth))
        if errors[-1] <= 0.004 and outcome.exit_code == 0:
            break
    assert outcome.exit_code == 0, outcome.stderr
    assert 0 <= errors[-1] <= 0.004, errors
    assert level["latencies"]["tpot"]["percentiles"]["p50"]["value"] == pytest.approx(0.020, abs=0.001)
    assert level["client"]["mean_in_flight"] == pytest.approx(64, rel=0.02)
    (tokens,) = level["crosschecks"]
    assert tokens["client"] == pytest.approx(tokens["engine"], rel=0.02)


def test_several_tokens_in_a_chunk_are_counted_by_the_server() -> None:
    with golden(per_event=4, itl_us=40_000) as server:
        outcome = faults.undisturbed(lambda: faults.bench(server.url, "--duration", "4s"))
    level = outcome.measurement["levels"][0]
    assert outcome.exit_code == 0, outcome.stderr
    assert level["tokens_per_chunk"] == pytest.approx(4)
    assert level["latencies"]["tpot"]["percentiles"]["p50"]["value"] == pytest.approx(0.120 / 15, rel=0.05)
    assert level["latencies"]["itl"]["percentiles"]["p50"]["value"] == pytest.approx(0.040, rel=0.05)


def in_turns(folder: Path, turns: str, *words: str, rate_per_s: int) -> Path:
    """Ask a golden server in sessions of several turns; return where the result is."""
    workload = faults.CHAT.replace("rate_per_s: 40", f"rate_per_s: {rate_per_s}") + f"turns: {{{turns}}}\n"
    with golden(itl_us=2000) as server:
        (folder / "w.yaml").write_text(workload)
        argv = [sys.executable, "-m", "powerband", "bench", server.url, "--workload", str(folder / "w.yaml")]
        subprocess.run([*argv, *words, "--output", str(folder / "out"), "--force"], check=False)
    return folder / "out"


def test_turns_carry_the_earlier_ones_and_their_answers(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 3, think_s: 50ms", "--duration", "4s", rate_per_s=30)
    found = records.read(out / "level-01.npz")
    by_turn: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for number, prompt, complete in zip(found["number"], found["prompt"], found.complete(), strict=True):
        if complete:
            by_turn[number % 3].add(prompt)
    first, second, third = (min(by_turn[turn]) for turn in range(3))
    assert second - first == third - second == pytest.approx(24 + 16, abs=3), "each turn adds a question and an answer"


def test_turns_are_counted_as_requests_are(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 3, think_s: 50ms", "--requests", "60", "--seed", "3", rate_per_s=40)
    level = json.loads((out / "measurement.json").read_text())["levels"][0]
    assert 60 <= level["requests"] <= 90


def test_a_window_of_turns_begins_when_sessions_have_run_their_course(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 4, think_s: 1s", "--requests", "400", rate_per_s=60)
    level = json.loads((out / "measurement.json").read_text())["levels"][0]
    assert level["warmup_s"] > 3, "three pauses of a second"
    assert level["requests"] / level["window_s"] == pytest.approx(60, rel=0.25)


def test_answers_of_many_lengths_are_no_drift_where_users_wait() -> None:
    """What was asked before the window and ends in it is long; what is asked in it and ends in it is short."""
    workload = faults.CHAT.replace("poisson, rate_per_s: 40", "closed, users: 32")
    workload = re.sub("output: .*", "output: {shape: lognormal, median: 60, p95: 200, max: 300}", workload)
    for seed in (0, 2, 0, 2):  # a hiccup of a shared machine is a drift
        with golden(itl_us=10_000) as server:
            outcome = faults.bench(server.url, "--requests", "64", "--seed", str(seed), "--force", workload=workload)
        if "steady state" not in outcome.refused:
            break
    assert "steady state" not in outcome.refused, outcome.stderr


def test_a_broken_promise_is_exit_4() -> None:
    with golden(ttft_us=300_000) as server:
        slo = "powerband: slo/1\nttft: {p50: 100ms}\n"
        outcome = faults.undisturbed(lambda: faults.bench(server.url, "--duration", "4s", slo=slo))
    assert outcome.exit_code == 4, outcome.stderr
    assert "the SLO was not kept" in outcome.stderr
    assert "breaks the SLO" in outcome.stdout


def test_a_climb_finds_the_highest_rate_that_holds() -> None:
    """Four places of 50 + 15 x 10 ms each: twenty requests a second, and none more."""
    knobs = (*FAKE, "--set", "max_num_seqs=4")
    slo = "powerband: slo/1\nttft: {p50: 150ms}\n"
    outcome = faults.bench(*knobs, "--profile", "climb", "--rate", "8", "--requests", "40", slo=slo)
    assert outcome.exit_code == 0, outcome.stderr
    best = outcome.measurement["levels"][outcome.measurement["best"]]
    assert 10 <= best["rate_per_s"] < 21
    assert len(outcome.measurement["levels"]) > 3


def test_a_climb_does_not_go_down_where_one_request_alone_is_late() -> None:
    slo = "powerband: slo/1\nttft: {p50: 1ms}\n"
    outcome = faults.bench(*FAKE, "--profile", "climb", "--rate", "8", "--requests", "40", slo=slo)
    assert outcome.exit_code == 4, outcome.stderr
    rate, alone = outcome.measurement["levels"]
    assert rate["rate_per_s"] == 8 and alone["users"] == 1 and "late" in alone["stopped_early"]
    assert "one at a time" in outcome.stdout and "--profile climb" not in outcome.stderr


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "powerband", "bench", *FAKE, "--workload", "chat", "--output", str(tmp_path)]
    process = subprocess.Popen([*argv, "--duration", "60s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    found = documents.read(tmp_path / "measurement.json")
    assert isinstance(found, Measurement) and found.interrupted
    assert found.levels[0].requests > 10 and found.levels[0].stopped_early == "interrupted"
    assert "Interrupted" in (tmp_path / "report.html").read_text()


def test_an_engine_that_dies_is_an_invalid_number(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "powerband", "bench", *FAKE, "--workload", "chat", "--output", str(tmp_path)]
    process = subprocess.Popen([*argv, "--duration", "30s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    pids: list[str] = []
    while not pids and time.monotonic() < deadline:
        time.sleep(0.5)
        port = (
            re.search(r"--port (\d+)", (tmp_path / "command.sh").read_text())
            if (tmp_path / "command.sh").exists()
            else None
        )
        found = (
            subprocess.run(["pgrep", "-f", f"golden .*--port {port[1]}"], capture_output=True, text=True)
            if port
            else None
        )
        pids = found.stdout.split() if found else []
    time.sleep(5)
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "died" in err and not out


class _Alone(HTMLParser):
    """Collect what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        if tag in ("script", "img", "link", "iframe") or any(name in ("src", "href") for name, _ in attrs):
            self.fetched.append(tag)


def test_the_report_stands_alone_and_diff_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(faults.CHAT)

    def run(name: str, ttft_us: int, seed: int) -> None:
        with golden(ttft_us=ttft_us) as server:
            argv = [sys.executable, "-m", "powerband", "bench", server.url, "--workload", str(tmp_path / "w.yaml")]
            words = ["--duration", "4s", "--seed", str(seed), "--output", str(tmp_path / name)]
            subprocess.run([*argv, *words, "--force"], check=False, capture_output=True)

    def diff(one: str, other: str) -> dict[str, object]:
        argv = [sys.executable, "-m", "powerband", "diff", str(tmp_path / one), str(tmp_path / other)]
        done = subprocess.run([*argv, "--json", "--force"], capture_output=True, text=True)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    run("a", 50_000, 1)
    run("b", 150_000, 2)  # so much slower that no noise of a machine hides it
    page = _Alone()
    page.feed((tmp_path / "a" / "report.html").read_text())
    assert page.pictures >= 3 and not page.fetched
    assert diff("a", "a")["different"] is False
    slower = diff("a", "b")
    assert slower["different"] is True
    says = {(one["metric"], one["percentile"]): one["says"] for one in slower["differences"]}  # type: ignore[attr-defined]
    assert says["ttft", "p50"] == "slower"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workload", "chatt"], "Did you mean 'chat'"),
        (["--profile", "climp"], "Did you mean 'climb'"),
        (["--profile", "sweep"], "a sweep needs its rates"),
        (["--profile", "climb"], "a climb needs a promise"),
        (["--rate", "1", "--users", "2"], "not both"),
        (["--output", "/dev/null/x"], "cannot hold results"),
    ],
)
def test_what_cannot_be_ordered_is_refused(words: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "powerband", "bench", *FAKE, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
