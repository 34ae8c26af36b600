"""Resume a study only under the same conditions: one spec, one machine, one version of each engine."""

from __future__ import annotations

import json
from pathlib import Path

from powerband.errors import InputError
from powerband.runtime import devices, installations
from powerband.store import runs
from powerband.tune.search_space import SearchSpace
from powerband.tune.spec import TuneSpec


def check_spec(spec: TuneSpec, space: SearchSpace, folder: Path) -> None:
    """Write the conditions of the study to spec.json; reject a folder with trials under other conditions."""
    host, path = devices.this_host(), folder / "spec.json"
    current = {
        "model": Path(spec.model).name,
        "workload": spec.workload.digest(),
        "SLO": spec.slo.digest(),
        "quality floor": spec.floor.digest() if spec.floor else "none",
        # without memory_bytes, which varies with the kernel
        "machine": {name: one for name, one in host.described().items() if name != "memory_bytes"},
        **{f"version of {name}": installations.find(name).version for name in space.by_engine},
    }
    if (folder / "asked.json").exists():
        raise InputError(
            f"{folder} holds a study of an earlier version of Powerband, with other lever names",
            hint="give another --output to start a new study",
        )
    before = json.loads(path.read_text()) if path.exists() else {}
    if changed := [name for name, now in current.items() if before.get(name, now) != now]:
        raise InputError(
            f"{folder} holds trials with another {' and another '.join(changed)}",
            hint="trials are comparable only under the same conditions: give another --output to start a new study",
        )
    runs.write_atomic(path, json.dumps(before | current, indent=1) + "\n")
