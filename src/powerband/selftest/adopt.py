"""Turn the bundle of a self-test into evidence: rows for the planner, an entry of the support table, test fixtures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

import powerband.plan as plan
from powerband.core.coefficients import Coefficients
from powerband.core.selftest import CheckResult, EngineFacts, Selftest
from powerband.plan import local_device
from powerband.runtime import devices
from powerband.selftest import bundle
from powerband.selftest.machine import device_name
from powerband.store import runs


@dataclass(frozen=True)
class Adopted:
    """The files that were written, and what was left out."""

    calibrations: tuple[Path, ...]
    support: tuple[Path, ...]
    fixtures: tuple[Path, ...]
    notes: tuple[str, ...]


def adopt(found: Selftest, folder: Path | None = None) -> Adopted:
    """Write the files below a folder; by default where `plan` reads this machine's calibrations.

    The default leaves out coefficients that would make plans on this machine worse.
    """
    bundle.check(found, {})  # a bundle of another machine: it has no path, and its owner's names are not known here
    target = folder or runs.state_root()
    calibrations, notes = [], []
    for one in found.calibrations:
        if folder is None and (why := _objection(found, one)):
            notes.append(f"{one.engine}: {why}; to write the coefficients elsewhere, give --output")
        elif one.devices:
            calibrations.append(_write_calibration(target / "calibrations", one))
    support = [_write_support(target / "support", found, one) for one in found.engines]
    failed = [one for one in found.checks if one.state == "failed"]
    fixtures = [_write_fixture(target / "fixtures", found, one) for one in failed]
    return Adopted(tuple(calibrations), tuple(support), tuple(fixtures), tuple(notes))


def _objection(found: Selftest, one: Coefficients) -> str:
    """Return why plans on this machine should not use the coefficients; empty: they should."""
    if found.rehearsed and not devices.system_root():
        return "rehearsed on a simulated host"
    host = devices.this_host()
    if local_device.NAME in one.devices:
        same = (found.machine.cpu, found.machine.cores) == (host.cpu_name, len(host.cores))
        return "" if same else f"measured on another CPU ({found.machine.cpu})"
    known = any(own.engine == one.engine and set(own.devices) & set(one.devices) for own in plan.coefficients())
    if known and device_name(host) not in one.devices:
        return f"the catalogue has more measurements of {', '.join(one.devices)}"
    return ""


def _write_calibration(folder: Path, one: Coefficients) -> Path:
    """Write coefficients; the names come from another machine, so they are reduced to letters, digits and dots."""
    # '~' marks adopted coefficients: `calibrate.saved` returns this machine's own first
    path = folder / f"{_slug(one.engine)}-{_slug(one.scheme or 'any')}~{_slug(one.devices[0])}.yaml"
    runs.write_atomic(path, one.to_text())
    return path


def _write_support(folder: Path, found: Selftest, one: EngineFacts) -> Path:
    """Write what the support table says of an engine on a device."""
    gpus = found.machine.gpus
    device = gpus[0].name if gpus else found.machine.cpu
    by = "rehearsed in the lab" if found.rehearsed else "measured by a user"
    entry = {
        "engine": one.engine,
        "version": one.version,
        "device": device,
        "count": max(1, len(gpus)),
        "driver": gpus[0].driver if gpus else None,
        "evidence": f"{by} on {device}, {one.engine} {one.version}",
        "powerband": found.version,
        "date": found.date,
        "checks": {check.check: check.state for check in found.checks if check.engine in (None, one.engine)},
    }
    path = folder / f"{one.engine}-{_slug(one.version)}-{found.machine.device or _slug(device)}.yaml"
    runs.write_atomic(path, yaml.safe_dump(entry, sort_keys=False))
    return path


def _write_fixture(folder: Path, found: Selftest, one: CheckResult) -> Path:
    """Write a failed check as a self-test with this check only."""
    kept = tuple(facts for facts in found.engines if facts.engine == one.engine)
    alone = found.model_copy(update={"checks": (one,), "engines": kept, "probes": (), "calibrations": ()})
    path = folder / f"{found.digest()[7:15]}-{one.engine or 'machine'}-{_slug(one.check)}.json"
    runs.write_atomic(path, alone.to_json())
    return path


def _slug(text: str) -> str:
    return "-".join("".join(letter if letter.isalnum() or letter == "." else " " for letter in text).lower().split())
