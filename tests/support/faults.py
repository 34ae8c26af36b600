"""Real faults for the guards of `bench`: each function causes one fault, measures it and returns the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.golden import binary, free_port, golden, wait_for

CHAT = """\
powerband: workload/1
name: short
arrivals: {process: poisson, rate_per_s: 40}
prompt: {shape: fixed, tokens: 24}
output: {shape: fixed, tokens: 16}
"""
SLO = "powerband: slo/1\nttft: {p90: 1s}\n"


@dataclass(frozen=True)
class Outcome:
    """The result of a `bench` command."""

    exit_code: int
    measurement: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def failed_guards(self) -> set[str]:
        """Return the names of the guards that failed."""
        levels = self.measurement.get("levels", ())
        return {one["guard"] for level in levels for one in level["verdicts"] if not one["valid"]}


def bench(
    *args: str,
    workload: str = CHAT,
    slo: str | None = None,
    files: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
) -> Outcome:
    """Run `powerband bench` and return its outcome."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "w.yaml").write_text(workload)
        for extra, text in (files or {}).items():
            (folder / extra).write_text(text)
        options = [*args, "--workload", str(folder / "w.yaml"), "--output", str(folder / "out")]
        if slo:
            (folder / "slo.yaml").write_text(slo)
            options += ["--slo", str(folder / "slo.yaml")]
        argv = [sys.executable, "-m", "powerband", "bench", *options]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})
        file = folder / "out" / "measurement.json"
        return Outcome(done.returncode, json.loads(file.read_text()) if file.exists() else {}, done.stdout, done.stderr)


def undisturbed(run: Callable[[], Outcome], *, tries: int = 5) -> Outcome:
    """Repeat a run until no guard fails because of other load on a shared machine."""
    for remaining in range(tries - 1, -1, -1):
        outcome = run()
        if not outcome.failed_guards & {"background load", "client", "steady state"} or not remaining:
            return outcome
        time.sleep(10)
    raise AssertionError("unreachable")


def clean(seed: int) -> Outcome:
    """A run without a fault."""
    with golden() as server:
        return bench(server.url, "--duration", "5s", "--seed", str(seed), slo=SLO)


def starved_client() -> Outcome:
    """The client is saturated: the Python wire reads 96,000 tokens/s."""
    flood = CHAT.replace("40}", "600}").replace("tokens: 16", "tokens: 160")
    with golden() as server:
        return bench(server.url, "--duration", "5s", workload=flood, env={"POWERBAND_PURE": "1"})


def more_than_it_can() -> Outcome:
    """The server has two slots, and the load needs eight."""
    knobs = ["--set", "max_num_seqs=2", "--set", "ttft_s=100ms", "--set", "itl_s=10ms"]
    return bench("--engine", "fake", *knobs, "--duration", "4s")


def capped_below_users() -> Outcome:
    """A closed loop of 32 users with --max-in-flight 8."""
    with golden() as server:
        return bench(server.url, "--users", "32", "--max-in-flight", "8", "--duration", "4s")


def drops_answers() -> Outcome:
    """The server closes the connection halfway in 9 % of the answers."""
    with golden(drop_percent=9) as server:
        return bench(server.url, "--duration", "5s")


def few_prompts() -> Outcome:
    """A dataset of 49 prompts for 4,000 requests."""
    workload = CHAT.replace("prompt: {shape: fixed, tokens: 24}", "dataset: {path: prompts.jsonl}").replace(
        "40}", "400}"
    )
    prompts = "".join(json.dumps({"prompt": f"question number {number}"}) + "\n" for number in range(49))
    with golden(tokens=4) as server:
        return bench(
            server.url,
            "--requests",
            "4000",
            workload=workload.replace("tokens: 16", "tokens: 4"),
            files={"prompts.jsonl": prompts},
        )


def wrong_usage() -> Outcome:
    """The server reports more output tokens than were requested."""
    with golden(lie_tokens=4) as server:
        return bench(server.url, "--duration", "5s")


def restarts() -> Outcome:
    """The server is killed and restarted during the measurement."""
    port, servers = free_port(), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:

        def start() -> None:
            servers.append(subprocess.Popen([str(binary()), str(port), f"{folder}/truth"]))
            wait_for(port)

        def replace() -> None:
            time.sleep(5)
            servers[0].kill()
            servers[0].wait()
            start()

        start()
        try:
            threading.Thread(target=replace, daemon=True).start()
            return bench(f"http://127.0.0.1:{port}", "--duration", "8s")
        finally:
            for server in servers:
                server.kill()
                server.wait()


def too_few_requests() -> Outcome:
    """60 requests for an SLO on p99."""
    with golden() as server:
        return bench(server.url, "--requests", "60", slo=SLO.replace("p90", "p99"))


def grows_slower() -> Outcome:
    """TTFT grows by 20 ms per second."""
    with golden(drift_us_per_s=20_000) as server:
        return bench(server.url, "--duration", "8s")


def neighbour() -> Outcome:
    """Other processes use every core."""
    with golden() as server, burning(os.cpu_count() or 1):
        return bench(server.url, "--duration", "5s")


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Run this many busy processes."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


# guard -> a fault that it must detect. Preemptions and a warm cache need a real engine: see the end-to-end tests.
FAULTS: dict[str, Callable[[], Outcome]] = {
    "client": starved_client,
    "overload": more_than_it_can,
    "concurrency": capped_below_users,
    "lost answers": drops_answers,
    "repeated prompts": few_prompts,
    "token counts": wrong_usage,
    "engine restart": restarts,
    "sample size": too_few_requests,
    "steady state": grows_slower,
    "background load": neighbour,
}
