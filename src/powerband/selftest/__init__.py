"""The stage `selftest`: check on this machine what is otherwise only rehearsed, and write a bundle to send."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import powerband
from powerband.core.host import Host
from powerband.core.selftest import CheckResult, Selftest
from powerband.runtime import devices
from powerband.selftest import bundle, exports, levers, machine, models, replicas, shared_start
from powerband.selftest.check import Check, Deadline, Outcome, not_run, perform
from powerband.selftest.engine_run import EngineRun
from powerband.store import runs

ENGINE_CHECKS: tuple[Check[EngineRun], ...] = (*shared_start.CHECKS, levers.CHECK, replicas.CHECK, exports.CHECK)


@dataclass(frozen=True)
class SelftestSpec:
    """What to check."""

    models: tuple[str, ...] = ()  # default: the smallest of each format in the caches
    engine: str | None = None
    budget_s: float = 2700.0
    probe_s: float = 120.0  # of each engine's probes


@dataclass
class Progress:
    """Callbacks that report progress; details may name paths."""

    report: Callable[[str], None] = lambda _: None
    on_result: Callable[[CheckResult, str], None] = lambda *_: None


@dataclass(frozen=True)
class Report:
    """The result of `run`: what may be sent."""

    found: Selftest


async def run(spec: SelftestSpec, progress: Progress | None = None) -> Report:
    """Run all checks that fit into the time; logs of the engines stay in a run directory."""
    progress, deadline = progress or Progress(), Deadline(spec.budget_s)
    installations = models.installed(spec.engine)
    chosen = models.choose(installations, spec.models)
    host, folder = devices.this_host(), runs.new_run("selftest")
    tested = [
        EngineRun(host, one, chosen[one.engine], folder, spec.probe_s, report=progress.report)
        for one in installations
        if one.engine in chosen
    ]
    bundle.check(_document(host, tested, ()))  # now, and not after the engines have run
    results: list[CheckResult] = []

    def add(result: CheckResult, detail: str) -> None:
        results.append(result)
        progress.on_result(result, detail)

    for check in machine.CHECKS:
        add(*await perform(check, host, engine=None))
    for number, one in enumerate(tested):
        one.deadline = Deadline(deadline.remaining_s / (len(tested) - number))
        await _check_engine(one, add)
    return Report(_document(host, tested, tuple(results)))


def _document(host: Host, tested: Sequence[EngineRun], checks: tuple[CheckResult, ...]) -> Selftest:
    return Selftest(
        version=powerband.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        rehearsed=bool(devices.system_root()),
        machine=bundle.machine_facts(host),
        engines=tuple(bundle.engine_facts(one.installation, one.model) for one in tested),
        checks=checks,
        probes=tuple(row for one in tested for row in one.probes),
        calibrations=tuple(one.calibration for one in tested if one.calibration),
    )


async def _check_engine(run: EngineRun, add: Callable[[CheckResult, str], None]) -> None:
    async with run.stack:
        for check in ENGINE_CHECKS:
            run.report(f"{run.engine}: {check.name}: {check.verifies}")
            fits = run.deadline.remaining_s > 0
            add(*await perform(check if fits else _skipped(check), run, engine=run.engine))


def _skipped(check: Check[EngineRun]) -> Check[EngineRun]:
    async def skip(_: EngineRun) -> Outcome:
        return not_run("out of time")

    return Check(check.name, check.verifies, skip)
