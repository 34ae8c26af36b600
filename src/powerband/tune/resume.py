"""What a study asks: its trials answer one question, on one machine, by one version of each engine."""

from __future__ import annotations

import json
from pathlib import Path

from powerband.errors import InputError
from powerband.runtime import devices, installations
from powerband.store import runs
from powerband.tune.search_space import SearchSpace
from powerband.tune.spec import TuneSpec


def note(order: TuneSpec, levers: SearchSpace, folder: Path) -> None:
    """Note what is asked, or refuse to go on with trials that cannot be compared with what would follow."""
    host, path = devices.this_host(), folder / "asked.json"
    asked = {
        "model": Path(order.model).name,
        "workload": order.workload.digest(),
        "SLO": order.slo.digest(),
        "quality floor": order.floor.digest() if order.floor else "none",
        "machine": {name: one for name, one in host.described().items() if name != "memory_bytes"},  # kernels differ
        **{f"version of {name}": installations.find(name).version for name in levers.by_engine},
    }
    before = json.loads(path.read_text()) if path.exists() else {}
    if other := [name for name, now in asked.items() if before.get(name, now) != now]:
        raise InputError(
            f"{folder} holds trials with another {' and another '.join(other)}",
            hint="trials are compared only where all else is the same: give another --output to begin anew",
        )
    runs.write_atomic(path, json.dumps(before | asked, indent=1) + "\n")
