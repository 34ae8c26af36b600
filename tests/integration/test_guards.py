"""Every guard refuses its fault, and the fault is real."""

import json
import resource
from pathlib import Path

import pytest

from powerband.bench import guards
from support import faults
from support.golden import golden

pytestmark = pytest.mark.quiet


@pytest.mark.parametrize("guard", faults.FAULTS)
def test_a_guard_refuses_a_real_fault(guard: str) -> None:
    outcome = faults.FAULTS[guard]()
    assert guard in outcome.refused, outcome.stderr
    assert outcome.exit_code == 3
    assert outcome.stdout == "", "an invalid number is not printed"
    assert "no valid number" in outcome.stderr and "hint:" in outcome.stderr


def test_every_guard_has_a_fault() -> None:
    needs_a_real_engine = {"preemptions"}
    assert set(faults.FAULTS) | needs_a_real_engine == set(guards.GUARDS)


def test_a_clean_run_is_printed_and_kept(tmp_path: Path) -> None:
    outcome = faults.undisturbed(lambda: faults.clean(7))
    assert outcome.exit_code == 0, outcome.stderr
    assert not outcome.refused
    ttft = outcome.measurement["levels"][0]["latencies"]["ttft"]
    assert ttft["percentiles"]["p50"]["value"] == pytest.approx(0.050, abs=0.003)
    assert "TTFT" in outcome.stdout and "keeps the SLO" in outcome.stdout
    assert json.dumps(outcome.measurement)


def test_more_open_requests_than_the_system_allows_are_said_so() -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    with golden(ttft_us=20_000_000) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, allowed[1]))
        try:
            outcome = faults.bench(server.url, "--duration", "5s")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert outcome.exit_code == 3
    assert "no more files be open" in outcome.stderr and "hint: raise the limit" in outcome.stderr


def test_force_prints_an_invalid_number_marked_as_such() -> None:
    with golden(drop_percent=30) as server:
        outcome = faults.bench(server.url, "--duration", "3s", "--force")
    assert outcome.exit_code == 3
    assert "INVALID lost answers" in outcome.stdout
