"""The machine that we run on, as a device."""

from __future__ import annotations

from powerband.core.device import Device, Price
from powerband.core.host import Host

NAME = "this-machine"
_GB = 10**9
_CORE_BANDWIDTH, _MOST_BANDWIDTH = 12 * _GB, 300 * _GB  # round numbers: calibrating tells what is reached
_CORE_GFLOPS = {"amx_bf16": 2000.0, "avx512_bf16": 250.0, "avx512f": 125.0, "avx2": 60.0, "asimd": 60.0}
_CORE_USD_PER_H = 0.045


def this_machine(host: Host, devices: list[Device]) -> tuple[Device, int]:
    """Return the catalogue's device that the driver names, and how many; without one, the CPU by round numbers."""
    if host.gpus:
        name = host.gpus[0].name
        for one in devices:
            if name in one.driver_names:
                alike = sum(gpu.name == name for gpu in host.gpus)
                return one.model_copy(update={"memory": min(gpu.memory_bytes for gpu in host.gpus)}), alike
    cores = len(host.cores)
    best = max((speed for name, speed in _CORE_GFLOPS.items() if name in host.instruction_sets), default=30.0)
    price = Price(usd_per_h=_CORE_USD_PER_H * cores, as_of="2026-05-20", source="a cloud's price for as many cores")
    device = Device(
        name=NAME,
        description=host.cpu_name,
        vendor="cpu",
        memory=host.available_bytes,
        bandwidth=min(cores * _CORE_BANDWIDTH, _MOST_BANDWIDTH),
        tflops={"bf16": cores * best / 1e3, "int8": 2 * cores * best / 1e3},
        link=_GB,
        node=1,
        watts=10.0 * cores,
        price=price,
        sources={"all": "round numbers for a CPU of so many cores"},
    )
    return device, 1
