"""The engines of a fleet of Powerband, as targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil

from powerband.diagnose.collect import Target
from powerband.errors import InputError


def targets(given: Target) -> list[Target]:
    """Return the servers to diagnose: a URL, or every running replica of a fleet's directory."""
    folder = Path(given.url)
    if not folder.is_dir():
        url = given.url if "://" in given.url else f"http://{given.url}"
        return [replace(given, url=url.rstrip("/").removesuffix("/v1"))]
    try:
        replicas = json.loads((folder / "status.json").read_text())["replicas"]
    except (OSError, ValueError, KeyError):
        raise InputError(
            f"no running fleet in {folder}: status.json is missing",
            hint="give the directory that 'powerband serve' prints, or a server's URL",
        ) from None
    found = [
        replace(given, url=one["engine"], pid=one["pid"] if psutil.pid_exists(one["pid"]) else None)
        for one in replicas
        if one.get("engine") and one.get("pid")
    ]
    if not found:
        raise InputError(
            f"none of the {len(replicas)} replicas of {folder} is running",
            hint=f"see their state with 'powerband top {folder}'",
        )
    return found
