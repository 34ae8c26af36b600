"""Skip failed timing tests if the hypervisor stole CPU time while they ran."""

from collections.abc import Generator

import psutil
import pytest

_MAX_STOLEN = 0.05  # share of the requested CPU time
_MIN_REQUESTED_S = 1.0  # CPU time below which the share is not reliable, as after a failed fixture
_BEGAN, _SHARE = pytest.StashKey[tuple[float, float]](), pytest.StashKey[float]()


def _clock() -> tuple[float, float]:
    times = psutil.cpu_times()
    return getattr(times, "steal", 0.0), sum(times) - times.idle


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the CPU times at the start of a test."""
    item.stash[_BEGAN] = _clock()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failure as skipped if the hypervisor stole CPU time."""
    report = yield
    if report.failed and item.get_closest_marker("quiet"):
        (stolen_s, requested_s), (stolen_before_s, requested_before_s) = _clock(), item.stash[_BEGAN]
        if requested_s - requested_before_s > _MIN_REQUESTED_S:
            item.session.stash[_SHARE] = (stolen_s - stolen_before_s) / (requested_s - requested_before_s)
        if (share := item.session.stash.get(_SHARE, 0.0)) > _MAX_STOLEN:
            why = f"Skipped: CPU steal was {share:.0%} of the requested CPU time (limit {_MAX_STOLEN:.0%})"
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, why)
    return report
