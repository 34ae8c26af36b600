"""This machine as a device."""

from __future__ import annotations

from powerband.core.device import Device, Price
from powerband.core.family import of_cpu
from powerband.core.host import Gpu, Host
from powerband.errors import InputError

NAME = "this-machine"
_GB = 10**9
# Round figures for a CPU; `plan --calibrate` measures what it reaches.
_CORE_BANDWIDTH, _MAX_BANDWIDTH = 12 * _GB, 300 * _GB
_CORE_GFLOPS = {"amx_bf16": 2000.0, "avx512_bf16": 250.0, "avx512f": 125.0, "avx2": 60.0, "asimd": 60.0}
_CORE_USD_PER_H = 0.045


def this_machine(host: Host, devices: list[Device]) -> tuple[Device, int]:
    """Return the catalogue's device for the host's GPUs and their number, or a CPU device estimated from its cores.

    Of GPUs of several kinds, those with the most memory in all count. A GPU that the catalogue does not know is
    refused: its bandwidth and price are unknown.
    """
    kinds = {gpu.name: [one for one in host.gpus if one.name == gpu.name] for gpu in host.gpus}
    if kinds:
        known = {name: (one, gpus) for name, gpus in kinds.items() if (one := _device(name, devices))}
        if not known:
            raise _unknown(host.gpus[0])
        device, gpus = max(known.values(), key=lambda pair: sum(gpu.memory_bytes for gpu in pair[1]))
        return device.model_copy(update={"memory": min(gpu.memory_bytes for gpu in gpus)}), len(gpus)
    cores = len(host.cores)
    gflops = max((speed for name, speed in _CORE_GFLOPS.items() if name in host.instruction_sets), default=30.0)
    price = Price(
        usd_per_h=_CORE_USD_PER_H * cores,
        as_of="2026-05-20",
        source=f"cloud price of {cores} CPU cores",
        estimated=True,
    )
    device = Device(
        name=NAME,
        description=host.cpu_name,
        vendor="cpu",
        family=of_cpu(host),
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


def _device(driver_name: str, devices: list[Device]) -> Device | None:
    return next((one for one in devices if driver_name in one.driver_names), None)


def _unknown(gpu: Gpu) -> InputError:
    return InputError(
        f"the catalogue has no device that the driver calls '{gpu.name}', so its bandwidth and price are unknown",
        hint="describe it in a device file with driver_names and give --on FILE, "
        "or name a similar device: 'powerband list devices'",
    )
