"""What counts as a disturbance of a timing test."""

import pytest

from support.quiet import Clock


@pytest.mark.parametrize(
    ("stolen_s", "others_s", "words"),
    [
        (0.0, {1: 5.0, 2: 7.0}, ""),  # both ran before
        (1.0, {1: 5.0, 2: 7.0}, "CPU steal was 10% of the requested CPU time (limit 5%)"),
        (0.0, {1: 5.0, 2: 7.0, 3: 8.0}, "background CPU load was 40% (limit 15%)"),
        (0.0, {1: 13.0, 2: 7.0}, "background CPU load was 40% (limit 15%)"),
        (0.0, {2: 7.1}, ""),
    ],
)
def test_a_disturbance_is_stolen_time_or_the_work_of_others(
    stolen_s: float, others_s: dict[int, float], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    begin = Clock(at_s=0.0, stolen_s=0.0, requested_s=0.0, others_s={1: 5.0, 2: 7.0})
    end = Clock(at_s=10.0, stolen_s=stolen_s, requested_s=10.0, others_s=others_s)
    assert begin.disturbance(end) == words


def test_a_failure_without_work_is_never_excused() -> None:
    begin = Clock(at_s=0.0, stolen_s=0.0, requested_s=0.0, others_s={})
    assert begin.disturbance(Clock(at_s=1.0, stolen_s=0.5, requested_s=0.5, others_s={1: 0.5})) == ""
