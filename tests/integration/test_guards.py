"""Every guard detects a real fault."""

import json
import resource
from pathlib import Path

import pytest

from powerband.bench import guards
from support import faults
from support.golden import golden

pytestmark = pytest.mark.quiet


@pytest.mark.parametrize("guard", faults.FAULTS)
def test_a_guard_detects_a_real_fault(guard: str) -> None:
    outcome = faults.FAULTS[guard]()
    assert guard in outcome.failed_guards, outcome.stderr
    assert outcome.exit_code == 5
    assert outcome.stdout == "", "an invalid measurement is not printed"
    assert "invalid measurement: " in outcome.stderr and "hint:" in outcome.stderr


def test_every_guard_has_a_fault() -> None:
    needs_a_real_engine = {"preemptions"}
    assert set(faults.FAULTS) | needs_a_real_engine == set(guards.GUARDS)


def test_a_clean_run_is_printed_and_stored(tmp_path: Path) -> None:
    outcome = faults.undisturbed(lambda: faults.clean(7))
    assert outcome.exit_code == 0, outcome.stderr
    assert not outcome.failed_guards
    ttft = outcome.measurement["levels"][0]["latencies"]["ttft"]
    assert ttft["percentiles"]["p50"]["value"] == pytest.approx(0.050, abs=0.003)
    assert "TTFT" in outcome.stdout and "meets the SLO" in outcome.stdout
    assert json.dumps(outcome.measurement)


def test_the_limit_of_open_files_is_reported() -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    with golden(ttft_us=20_000_000) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, allowed[1]))
        try:
            outcome = faults.bench(server.url, "--duration", "5s")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert outcome.exit_code == 5
    assert "too many open files" in outcome.stderr and "hint: raise the limit" in outcome.stderr


def test_force_prints_an_invalid_measurement_marked_as_such() -> None:
    with golden(drop_percent=30) as server:
        outcome = faults.bench(server.url, "--duration", "3s", "--force")
    assert outcome.exit_code == 5
    assert "INVALID lost answers" in outcome.stdout
