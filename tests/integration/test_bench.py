"""`bench` against a server with known latencies, and the possible ends of a run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import powerband as pb
from powerband.core.measurement import Measurement
from powerband.errors import InvalidMeasurement
from powerband.store import documents, records
from support import faults
from support.golden import golden

pytestmark = pytest.mark.quiet

FAKE = ("--engine", "fake", "--set", "ttft_s=50ms", "--set", "itl_s=10ms")


def test_latencies_match_those_of_the_golden_server() -> None:
    workload = faults.CHAT.replace("poisson, rate_per_s: 40", "closed, users: 64")
    errors = []
    for _ in range(3):  # delays of a shared machine only add to the error
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


def test_tokens_per_chunk_come_from_the_server_usage() -> None:
    with golden(per_event=4, itl_us=40_000) as server:
        outcome = faults.undisturbed(lambda: faults.bench(server.url, "--duration", "4s"))
    level = outcome.measurement["levels"][0]
    assert outcome.exit_code == 0, outcome.stderr
    assert level["tokens_per_chunk"] == pytest.approx(4)
    assert level["latencies"]["tpot"]["percentiles"]["p50"]["value"] == pytest.approx(0.120 / 15, rel=0.05)
    assert level["latencies"]["itl"]["percentiles"]["p50"]["value"] == pytest.approx(0.040, rel=0.05)


def in_turns(folder: Path, turns: str, *options: str, rate_per_s: int) -> Path:
    """Measure a golden server with multi-turn sessions; return the folder of the result."""
    workload = faults.CHAT.replace("rate_per_s: 40", f"rate_per_s: {rate_per_s}") + f"turns: {{{turns}}}\n"
    with golden(itl_us=2000) as server:
        (folder / "w.yaml").write_text(workload)
        argv = [sys.executable, "-m", "powerband", "bench", server.url, "--workload", str(folder / "w.yaml")]
        subprocess.run([*argv, *options, "--output", str(folder / "out"), "--force"], check=False)
    return folder / "out"


def test_a_turn_contains_the_earlier_turns_and_answers(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 3, think_s: 50ms", "--duration", "4s", rate_per_s=30)
    found = records.read(out / "level-01.npz")
    by_turn: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for number, prompt, complete in zip(found["number"], found["prompt"], found.complete(), strict=True):
        if complete:
            by_turn[number % 3].add(prompt)
    first, second, third = (min(by_turn[turn]) for turn in range(3))
    assert second - first == third - second == pytest.approx(24 + 16, abs=3), "each turn adds a question and an answer"


def test_every_turn_counts_as_a_request(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 3, think_s: 50ms", "--requests", "60", "--seed", "3", rate_per_s=40)
    level = json.loads((out / "measurement.json").read_text())["levels"][0]
    assert 60 <= level["requests"] <= 90


def test_a_window_of_sessions_starts_after_sessions_have_ended(tmp_path: Path) -> None:
    out = in_turns(tmp_path, "count: 4, think_s: 1s", "--requests", "400", rate_per_s=60)
    level = json.loads((out / "measurement.json").read_text())["levels"][0]
    assert level["warmup_s"] > 3, "three pauses of a second"
    assert level["requests"] / level["window_s"] == pytest.approx(60, rel=0.25)


def test_answers_of_different_lengths_are_no_drift_in_a_closed_loop() -> None:
    """Answers that start before the window and end in it are longer than those that start and end in it."""
    workload = faults.CHAT.replace("poisson, rate_per_s: 40", "closed, users: 32")
    workload = re.sub("output: .*", "output: {shape: lognormal, median: 60, p95: 200, max: 300}", workload)
    for seed in (0, 2, 0, 2):  # a delay of a shared machine looks like drift
        with golden(itl_us=10_000) as server:
            outcome = faults.bench(server.url, "--requests", "64", "--seed", str(seed), "--force", workload=workload)
        if "steady state" not in outcome.failed_guards:
            break
    assert "steady state" not in outcome.failed_guards, outcome.stderr


def test_a_missed_slo_is_exit_4() -> None:
    with golden(ttft_us=300_000) as server:
        slo = "powerband: slo/1\nttft: {p50: 100ms}\n"
        outcome = faults.undisturbed(lambda: faults.bench(server.url, "--duration", "4s", slo=slo))
    assert outcome.exit_code == 4, outcome.stderr
    assert "the SLO is missed" in outcome.stderr
    assert "misses the SLO" in outcome.stdout


def test_a_climb_finds_the_max_rate_within_the_slo() -> None:
    """Four slots with 50 + 15 x 10 ms per request have a capacity of 20 requests/s."""
    knobs = (*FAKE, "--set", "max_num_seqs=4")
    slo = "powerband: slo/1\nttft: {p50: 150ms}\n"
    outcome = faults.bench(*knobs, "--profile", "climb", "--rate", "8", "--requests", "40", slo=slo)
    assert outcome.exit_code == 0, outcome.stderr
    best = outcome.measurement["levels"][outcome.measurement["best"]]
    assert 10 <= best["rate_per_s"] < 21
    assert len(outcome.measurement["levels"]) > 3


def test_a_climb_ends_if_concurrency_1_misses_the_slo() -> None:
    slo = "powerband: slo/1\nttft: {p50: 1ms}\n"
    outcome = faults.bench(*FAKE, "--profile", "climb", "--rate", "8", "--requests", "40", slo=slo)
    assert outcome.exit_code == 4, outcome.stderr
    rate, single = outcome.measurement["levels"]
    assert rate["rate_per_s"] == 8 and single["users"] == 1 and "late" in single["stopped_early"]
    assert "concurrency 1" in outcome.stdout and "--profile climb" not in outcome.stderr


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


def test_a_crashed_engine_is_an_invalid_measurement(tmp_path: Path) -> None:
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
    assert process.returncode == 5, err
    assert "died" in err and not out


class _PageScanner(HTMLParser):
    """Collect the charts of a page, and everything it would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        if tag in ("script", "img", "link", "iframe") or any(name in ("src", "href") for name, _ in attrs):
            self.fetched.append(tag)


def test_the_report_is_self_contained_and_diff_reads_the_files(tmp_path: Path) -> None:
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
    run("b", 150_000, 2)  # a difference well above the noise of a shared machine
    page = _PageScanner()
    page.feed((tmp_path / "a" / "report.html").read_text())
    assert page.charts >= 3 and not page.fetched
    assert diff("a", "a")["different"] is False
    slower = diff("a", "b")
    assert slower["different"] is True
    verdicts = {(one["metric"], one["percentile"]): one["verdict"] for one in slower["differences"]}  # type: ignore[attr-defined]
    assert verdicts["ttft", "p50"] == "slower"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "chatt"], "Did you mean 'chat'"),
        (["--profile", "climp"], "Did you mean 'climb'"),
        (["--profile", "sweep"], "--profile sweep requires --rates"),
        (["--profile", "climb"], "--profile climb requires an SLO"),
        (["--rate", "1", "--users", "2"], "exclude each other"),
        (["--output", "/dev/null/x"], "cannot create the directory"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "powerband", "bench", *FAKE, *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_an_invalid_measurement_is_raised_unless_forced(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"workload": "classify", "rate": 40.0, "requests": 20, "slo": "interactive"}
    with pytest.raises(InvalidMeasurement, match="needs at least"):
        pb.bench(**arguments, output=tmp_path)
    forced = pb.bench(**arguments, output=tmp_path, force=True)
    assert not forced.valid and forced.to_records()[0]["latencies.ttft.percentiles.p50"] > 0
    assert (tmp_path / "report.html").exists() and "<iframe" in forced._repr_html_()
