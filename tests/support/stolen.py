"""A test that measures time tells nothing while the host takes the machine's CPU: then it is skipped, and says so."""

from collections.abc import Generator

import psutil
import pytest

_STOLEN = 0.05  # of the CPU that was asked for; a quiet machine loses none
_LEAST_S = 1.0  # asked for, in which that can be told; a fixture that failed before fails again at once
_BEGAN, _SHARE = pytest.StashKey[tuple[float, float]](), pytest.StashKey[float]()


def _clock() -> tuple[float, float]:
    times = psutil.cpu_times()
    return getattr(times, "steal", 0.0), sum(times) - times.idle


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note when a test begins."""
    item.stash[_BEGAN] = _clock()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a failure that the host may be to blame for into a skip with its reason."""
    report = yield
    if report.failed and item.get_closest_marker("quiet"):
        (stolen_s, asked_s), (stolen_before_s, asked_before_s) = _clock(), item.stash[_BEGAN]
        if asked_s - asked_before_s > _LEAST_S:
            item.session.stash[_SHARE] = (stolen_s - stolen_before_s) / (asked_s - asked_before_s)
        if (share := item.session.stash.get(_SHARE, 0.0)) > _STOLEN:
            why = f"Skipped: the host took {share:.0%} of the CPU that this machine asked for meanwhile"
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, why)
    return report
