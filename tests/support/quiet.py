"""Skip a failed timing test, with the reason, if the hypervisor or other processes took the CPU while it ran."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Self

import psutil
import pytest

_MAX_STOLEN = 0.05  # share of the requested CPU time
_MIN_REQUESTED_S = 1.0  # CPU time below which the share is not reliable, as after a failed fixture
_MAX_BACKGROUND = 0.15  # share of the machine's CPU time: the limit of the guard of `bench`
_MARK = f"POWERBAND_TESTS_{os.getpid()}"  # in the environment of every process that these tests start
_BEGAN = pytest.StashKey["Clock"]()
_DISTURBED = pytest.StashKey[str]()


@dataclass(frozen=True)
class Clock:
    """CPU times at one moment, in seconds."""

    at_s: float
    stolen_s: float
    requested_s: float
    others_s: dict[int, float]  # of each process that is not of these tests, with its children that have ended

    @classmethod
    def read(cls) -> Self:
        """Return the CPU times until now."""
        times = psutil.cpu_times()
        requested_s = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        return cls(time.monotonic(), getattr(times, "steal", 0.0), requested_s, dict(_others()))

    def disturbance(self, end: Clock) -> str:
        """Return what took the CPU between two moments; empty: nothing that is known."""
        elapsed_s, requested_s = end.at_s - self.at_s, end.requested_s - self.requested_s
        if requested_s < _MIN_REQUESTED_S:
            return ""
        stolen = (end.stolen_s - self.stolen_s) / requested_s
        if stolen > _MAX_STOLEN:
            return f"CPU steal was {stolen:.0%} of the requested CPU time (limit {_MAX_STOLEN:.0%})"
        used_s = sum(cpu_s - self.others_s.get(pid, 0.0) for pid, cpu_s in end.others_s.items())
        background = used_s / elapsed_s / (psutil.cpu_count() or 1)
        if background > _MAX_BACKGROUND:
            return f"background CPU load was {background:.0%} (limit {_MAX_BACKGROUND:.0%})"
        return ""


def _others() -> Iterator[tuple[int, float]]:
    """Yield the CPU time of each process that these tests have not started."""
    ours = {os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))}
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if one.pid not in ours and not _marked(one):
                yield one.pid, sum(one.cpu_times()[:4])


def _marked(process: psutil.Process) -> bool:
    try:
        return _MARK in process.environ()
    except (psutil.AccessDenied, OSError):
        return False


def pytest_configure() -> None:
    """Mark the processes of these tests, also those whose parents end."""
    os.environ[_MARK] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the CPU times at the start of a timing test."""
    if item.get_closest_marker("quiet"):
        item.stash[_BEGAN] = Clock.read()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report the failure of a timing test as skipped if something else took the CPU."""
    report = yield
    if report.failed and _BEGAN in item.stash:
        disturbed = item.stash[_BEGAN].disturbance(Clock.read())
        if disturbed:
            item.session.stash[_DISTURBED] = disturbed
        elif report.when == "setup":  # a fixture that failed before does not run again
            disturbed = item.session.stash.get(_DISTURBED, "")
        if disturbed:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {disturbed}")
    return report
