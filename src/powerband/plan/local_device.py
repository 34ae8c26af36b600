"""This machine as a device."""

from __future__ import annotations

from powerband.core.device import Device, Price
from powerband.core.host import Host

NAME = "this-machine"
_GB = 10**9
# Round figures for a CPU; `plan --calibrate` measures what it reaches.
_CORE_BANDWIDTH, _MAX_BANDWIDTH = 12 * _GB, 300 * _GB
_CORE_GFLOPS = {"amx_bf16": 2000.0, "avx512_bf16": 250.0, "avx512f": 125.0, "avx2": 60.0, "asimd": 60.0}
_CORE_USD_PER_H = 0.045


def this_machine(host: Host, devices: list[Device]) -> tuple[Device, int]:
    """Return the catalogue's device for the host's GPUs and their number, or a CPU device estimated from its cores."""
    if host.gpus:
        name = host.gpus[0].name
        for one in devices:
            if name in one.driver_names:
                count = sum(gpu.name == name for gpu in host.gpus)
                return one.model_copy(update={"memory": min(gpu.memory_bytes for gpu in host.gpus)}), count
    cores = len(host.cores)
    gflops = max((speed for name, speed in _CORE_GFLOPS.items() if name in host.instruction_sets), default=30.0)
    price = Price(
        usd_per_h=_CORE_USD_PER_H * cores, as_of="2026-05-20", source=f"cloud price of {cores} CPU cores, estimated"
    )
    device = Device(
        name=NAME,
        description=host.cpu_name,
        vendor="cpu",
        memory=host.available_bytes,
        bandwidth=min(cores * _CORE_BANDWIDTH, _MAX_BANDWIDTH),
        tflops={"bf16": cores * gflops / 1e3, "int8": 2 * cores * gflops / 1e3},
        link=_GB,
        node=1,
        watts=10.0 * cores,
        price=price,
        sources={"all": f"estimated for a CPU with {cores} cores"},
    )
    return device, 1
