"""Read the GPUs of this machine: NVIDIA by NVML, AMD from sysfs, Apple silicon from sysctl.

A fact that a driver does not answer is left out and named in `Gpu.unknown`; it does not hide the GPU, or the others.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from powerband.core.host import Gpu
from powerband.errors import InputError

_METAL_SHARE = 0.75  # of the memory of Apple silicon that Metal lets one process use
_XGMI = 11  # type of a link in the KFD topology
_AMD_NAMES = {  # by PCI device id, where the driver has no product name
    "0x74a0": "AMD Instinct MI300A", "0x74a1": "AMD Instinct MI300X", "0x74a5": "AMD Instinct MI325X",
    "0x75a0": "AMD Instinct MI350X", "0x75a3": "AMD Instinct MI355X", "0x740f": "AMD Instinct MI210",
    "0x7408": "AMD Instinct MI250X", "0x738c": "AMD Instinct MI100", "0x744c": "AMD Radeon RX 7900 XTX",
    "0x1586": "AMD Radeon 8060S Graphics",
}  # fmt: skip
T = TypeVar("T")


def visible(root: str = "", environment: Mapping[str, str] = os.environ) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs that this process may use, and a problem with a driver; no GPU is no problem."""
    nvidia, problem = _nvidia(root)
    amd = _amd(root)
    found = (
        *_shown(nvidia, environment, "CUDA_VISIBLE_DEVICES"),
        *_shown(amd, environment, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    )
    return found or _apple(root), problem


def selection(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the environment variable that shows a process only these GPUs."""
    if not gpus or gpus[0].vendor == "apple":
        return {}
    if gpus[0].vendor == "amd":
        return {"HIP_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus)}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus)}


def _shown(gpus: Sequence[Gpu], environment: Mapping[str, str], *variables: str) -> tuple[Gpu, ...]:
    """Return the GPUs that an environment variable lists, by index or UUID, in its order."""
    name = next((one for one in variables if one in environment), None)
    if name is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for word in filter(None, (one.strip() for one in environment[name].split(","))):
        if word == "-1":
            break
        able = [gpu for gpu in gpus if word == str(gpu.index) or (gpu.uuid and gpu.uuid.startswith(word))]
        if len(able) != 1 or able[0] in found:
            fault = "is listed twice" if able and able[0] in found else "names no GPU of this machine"
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
            raise InputError(
                f"{name}={environment[name]}: '{word}' {fault}; GPUs: {known}", hint=f"correct or unset {name}"
            )
        found += able
    return tuple(found)


def _nvidia(root: str) -> tuple[tuple[Gpu, ...], str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return (), None
    except pynvml.NVMLError as error:
        return (), f"NVML cannot connect to the NVIDIA driver: {error}"
    try:
        driver = _asked(lambda: _text(pynvml.nvmlSystemGetDriverVersion())) or "unknown"
        handles, broken = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles += _instances(index, pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:
                broken.append(f"GPU {index} does not answer ({error})")
        gpus = [gpu for index, handle in handles if (gpu := _nvidia_gpu(index, handle, driver, root))]
        silent = [f"GPU {index} reports no memory" for index, _ in handles if index not in {gpu.index for gpu in gpus}]
        islands = _islands([handle for index, handle in handles if index in {gpu.index for gpu in gpus}])
        found = tuple(gpu.model_copy(update={"island": one}) for gpu, one in zip(gpus, islands, strict=True))
        return found, "; ".join([*broken, *silent]) or None
    except pynvml.NVMLError as error:
        return (), f"NVML failed: {error}"
    finally:
        pynvml.nvmlShutdown()


def _instances(index: int, handle: Any) -> list[tuple[int, Any]]:
    """Return a GPU, or its instances if it is in MIG mode: the whole GPU cannot be used then."""
    import pynvml

    mode = _asked(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
    if not mode:
        return [(index, handle)]
    found = []
    for number in range(_asked(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        one = _asked(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number))
        found += [(index, one)] if one is not None else []
    return found


def _nvidia_gpu(index: int, handle: Any, driver: str, root: str) -> Gpu | None:
    """Return a GPU with the facts that the driver answers; None without its memory."""
    import pynvml

    unknown: list[str] = []

    def asked(fact: str, ask: Callable[[], T]) -> T | None:
        if (found := _asked(ask)) is None:
            unknown.append(fact)
        return found

    memory = asked("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    if memory is None:
        return None
    capability = asked("compute capability", lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    bus = _asked(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return Gpu(
        index=index,
        name=asked("name", lambda: _text(pynvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU of unknown name",
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=driver,
        uuid=asked("UUID", lambda: _text(pynvml.nvmlDeviceGetUUID(handle))),
        compute_capability=".".join(map(str, capability)) if capability else None,
        numa_node=_numa_node(f"{root}/sys/bus/pci/devices", bus) if bus else None,
        unknown=tuple(unknown),
    )


def _numa_node(devices: str, bus: str) -> int | None:
    """Return the NUMA node of a PCI device; NVML writes eight digits for the domain, sysfs four."""
    with contextlib.suppress(OSError, ValueError):
        node = int((Path(devices) / bus.lower()[-12:] / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _islands(handles: Sequence[Any]) -> list[int | None]:
    """Return for each GPU the number of its island: GPUs that reach each other by NVLink."""
    import pynvml

    found: list[int | None] = []
    for number, handle in enumerate(handles):
        linked: int | None = number
        for other in range(number):
            nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            status = _asked(partial(pynvml.nvmlDeviceGetP2PStatus, handle, handles[other], nvlink))
            if status is None:
                return [None] * len(handles)
            if status == pynvml.NVML_P2P_STATUS_OK:
                linked = found[other]
                break
        found.append(linked)
    return found


def _amd(root: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the topology of the KFD driver; its index is HIP's."""
    nodes = Path(f"{root}/sys/class/kfd/kfd/topology/nodes")
    known = [(folder, _properties(folder / "properties")) for folder in sorted(nodes.glob("*"), key=_number)]
    gpus = [(folder, own) for folder, own in known if own.get("simd_count", 0) > 0]
    ranks = {folder.name: index for index, (folder, _) in enumerate(gpus)}
    found: list[Gpu] = []
    for index, (folder, own) in enumerate(gpus):
        device = Path(f"{root}/sys/class/drm/renderD{own.get('drm_render_minor', 0)}/device")
        total, used = _read(device / "mem_info_vram_total"), _read(device / "mem_info_vram_used")
        if not total:
            continue
        links = [_properties(link / "properties") for link in folder.glob("io_links/*")]
        linked = [ranks[str(link["node_to"])] for link in links
                  if link.get("type") == _XGMI and str(link.get("node_to")) in ranks]  # fmt: skip
        version = own.get("gfx_target_version", 0)
        node = _read(device / "numa_node")
        found.append(
            Gpu(
                index=index,
                name=_line(device / "product_name") or _AMD_NAMES.get(_line(device / "device"), "unknown AMD GPU"),
                memory_bytes=total,
                free_bytes=total - (used or 0),
                driver=_line(Path(f"{root}/sys/module/amdgpu/version")) or "amdgpu",
                uuid=f"GPU-{own['unique_id']:x}" if own.get("unique_id") else None,
                compute_capability=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
                vendor="amd",
                numa_node=node if node is not None and node >= 0 else None,
                island=min([index, *linked]),
            )
        )
    return tuple(found)


def _number(folder: Path) -> int:
    return int(folder.name) if folder.name.isdigit() else -1


def _properties(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and re.fullmatch(r"-?\d+", pair[1])}
    return {}


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> int | None:
    text = _line(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _apple(root: str) -> tuple[Gpu, ...]:
    """Return the GPU of Apple silicon, which shares the memory of the machine."""
    if root or platform.system() != "Darwin" or platform.machine() != "arm64":
        return ()
    name = subprocess.run(
        ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
    ).stdout.strip()
    return (apple_gpu(name, psutil.virtual_memory().total, psutil.virtual_memory().available),)


def apple_gpu(name: str, total_bytes: int, available_bytes: int) -> Gpu:
    """Return the GPU of Apple silicon with the part of the memory that Metal lets it use."""
    usable = int(_METAL_SHARE * total_bytes)
    return Gpu(
        index=0,
        name=name,
        memory_bytes=usable,
        free_bytes=min(usable, available_bytes),
        driver=f"macOS {platform.mac_ver()[0]}".strip(),
        vendor="apple",
        shares_memory=True,
    )


def _asked(ask: Callable[[], T]) -> T | None:
    """Return an answer of NVML; None: the driver does not support the question, or fails."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return ask()
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
