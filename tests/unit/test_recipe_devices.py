"""The devices that a recipe records, and `verify` on a machine that has fewer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from powerband.core.allocation import Need
from powerband.core.engine import Footprint
from powerband.core.host import Gpu, Host
from powerband.errors import DeploymentRefused
from powerband.runtime import devices
from powerband.testing.engine_contract import HOST
from powerband.tune.recipe import replica_devices
from powerband.verify import VerifySpec, verify
from support.recipes import recipe


def host(*names: str, vendor: str = "nvidia") -> Host:
    size = 80 * 2**30
    found = [
        Gpu.model_validate(
            {"index": n, "name": name, "memory_bytes": size, "free_bytes": size, "driver": "1", "vendor": vendor}
        )
        for n, name in enumerate(names)
    ]
    return HOST.model_copy(update={"gpus": tuple(found)})


@pytest.mark.parametrize(
    ("where", "footprint", "allowed", "recorded"),
    [
        (HOST, Footprint(), None, {"gpus": 0, "device_vendor": "cpu", "device_name": "a CPU"}),
        (
            host("H100", "H100", "H100", "H100"),
            Footprint(gpu_ways=2, copies=2),
            None,
            {"gpus": 4, "device_vendor": "nvidia", "device_name": "H100"},
        ),
        (
            host("MI300X", "MI325X", vendor="amd"),
            Footprint(gpu_ways=1),
            (1,),
            {"gpus": 1, "device_vendor": "amd", "device_name": "MI325X"},
        ),
    ],
)
def test_a_recipe_records_the_devices_of_a_replica(
    where: Host, footprint: Footprint, allowed: tuple[int, ...] | None, recorded: dict[str, Any]
) -> None:
    prepared: Any = SimpleNamespace(host=where, footprint=footprint, need=Need(allowed=allowed))
    own = type(recipe()).model_validate(recipe().model_dump() | replica_devices(prepared))
    assert {name: getattr(own, name) for name in recorded} == recorded


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (HOST, "0 of the 0 visible GPUs"),
        (host("NVIDIA L4", "NVIDIA L4"), r"2 of the 2 visible GPUs .*\(NVIDIA L4\)"),
        (host(*["AMD Instinct MI300X"] * 4, vendor="amd"), "0 of the 4 visible GPUs are from nvidia"),
    ],
)
def test_verify_refuses_a_machine_with_too_few_gpus(
    where: Host, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "this_host", lambda: where)
    needs_four = {"gpus": 4, "device_vendor": "nvidia", "device_name": "NVIDIA H100 80GB HBM3"}
    spec = VerifySpec(recipe("vllm", tensor_parallel_size=4).model_copy(update=needs_four))
    with pytest.raises(DeploymentRefused, match=found) as error:
        asyncio.run(verify(spec, folder=tmp_path))
    assert "runs on 4 x NVIDIA H100 80GB HBM3" in error.value.message
    assert "powerband doctor" in error.value.hint and "powerband tune" in error.value.hint
    assert not list(tmp_path.iterdir()), "nothing was started"
