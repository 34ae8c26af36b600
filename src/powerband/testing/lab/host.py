"""Write the folder of a simulated host, and return the environment of its processes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powerband.core.device import Device
from powerband.errors import InputError
from powerband.plan import device
from powerband.testing.lab import server
from powerband.testing.lab.spec import DeviceGroup, HostSpec, Lab
from powerband.testing.lab.world import ENVIRONMENT, LabDevice

__all__ = ["DeviceGroup", "HostSpec", "Lab", "build", "environment", "sparse_model"]

_GFX_VERSIONS = {"mi300x": "90402", "mi325x": "90402", "mi355x": "90500"}  # of KFD
_OTHERS_PID = 1  # holds the memory of other people's processes: it always runs
_FLAGS = "fpu sse4_2 avx avx2 bmi2 fma f16c avx512f avx512cd avx512vl avx512dq avx512bw avx512_vnni avx512_bf16"
_TASKSET = '#!/bin/sh\nexport POWERBAND_LAB_CORES="$2"\nshift 2\nexec "$@"\n'
_XGMI, _PCIE = 11, 2


def build(lab: Lab, folder: Path) -> dict[str, Path]:
    """Write the folders of all hosts below `folder`; return them by name."""
    library = _compile(folder)
    return {spec.name: _build_host(spec, lab, folder / spec.name, library) for spec in lab.hosts}


def environment(host: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process on a host."""
    kept = {name: value for name, value in base.items() if not name.endswith("_VISIBLE_DEVICES")}
    return {
        **kept,
        ENVIRONMENT: str(host),
        "POWERBAND_SYSTEM_ROOT": str(host / "system"),
        "POWERBAND_STATE": str(host / "state"),
        "POWERBAND_VLLM": str(host / "bin" / "vllm"),
        "POWERBAND_LLAMACPP": str(host / "bin" / "llama-server"),
        "PATH": f"{host / 'bin'}{os.pathsep}{base.get('PATH', '')}",
        "LD_LIBRARY_PATH": f"{host / 'lib'}{os.pathsep}{base.get('LD_LIBRARY_PATH', '')}",
    }


def sparse_model(folder: Path, config: Mapping[str, Any], weight_bytes: int, *, shards: int = 1) -> Path:
    """Write a model of a size that takes no space on the disk: a config.json, a tokenizer, and safetensors of zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    weights = {}
    for number in range(1, shards + 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        weights[f"weights.{number}"] = file
        size = weight_bytes // shards
        tensor = {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({f"weights.{number}": tensor}).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + size)
    if shards > 1:
        index = {"metadata": {"total_size": weight_bytes}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_TOKENIZER = {  # counts as the stand-ins do
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": server.PIECE}, "behavior": "Isolated", "invert": False},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
}


def _compile(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise InputError("the lab needs a C compiler for its stand-in of NVML", hint="install gcc")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return library


def _build_host(spec: HostSpec, lab: Lab, host: Path, library: Path) -> Path:
    for name in ("bin", "lib", "devices", "state", "system"):
        (host / name).mkdir(parents=True, exist_ok=True)
    if spec.driver:
        (host / "lib" / library.name).symlink_to(library)
    groups = [group for group in spec.devices for _ in range(group.count)]
    gpus = [_device(spec, group, index, lab.seed) for index, group in enumerate(groups)]
    nvidia = [one for one in gpus if not one.name.startswith("AMD")]
    data = {
        "name": spec.name,
        "seed": lab.seed,
        "time_scale": lab.time_scale,
        "start_scale": lab.start_scale or lab.time_scale,
        "ignored_options": spec.ignored_options,
        "hidden_metrics": spec.hidden_metrics,
        "load_bytes_per_s": spec.loads,
        "devices": [asdict(one) for one in nvidia],
    }
    (host / "host.json").write_text(json.dumps(data))
    for one, group in zip(gpus, groups, strict=True):
        used = f"{_OTHERS_PID} {group.used}\n" if group.used else ""
        (host / "devices" / one.uuid).write_text(used)
    if nvidia and spec.driver:
        (host / "driver.txt").write_text(f"{spec.driver}\n")
        (host / "nvml.txt").write_text("".join(_nvml_line(spec, one) for one in nvidia))
    for name, module in (("vllm", "vllm"), ("llama-server", "llama_server")):
        _program(host / "bin" / name, f'#!/bin/sh\nexec {sys.executable} -m powerband.testing.lab.{module} "$@"\n')
    _program(host / "bin" / "taskset", _TASKSET)
    _write_system(host / "system", spec, gpus)
    return host


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _known(name: str) -> Device | None:
    try:
        return device(name)
    except InputError:
        return None


def _device(spec: HostSpec, group: DeviceGroup, index: int, seed: int) -> LabDevice:
    known = _known(group.device)
    memory = group.memory or (known.memory if known else 0)
    total = sum(one.count for one in spec.devices)
    position = index - sum(one.count for one in spec.devices[: spec.devices.index(group)])
    return LabDevice(
        index=index,
        uuid=f"GPU-{seed:04x}{abs(hash_of(spec.name)):08x}-{index:04x}",
        device=group.device,
        name=known.driver_names[0] if known else group.device,
        memory_bytes=memory,
        capability=_GFX_VERSIONS.get(group.device) or (known and known.compute_capability) or "9.0",
        numa_node=index * spec.numa_nodes // max(1, total),
        island=index // group.island if group.island else 0,
        slowdown=group.slow.get(position, 1.0),
    )


def hash_of(text: str) -> int:
    """Return a number that is the same in every process, unlike `hash`."""
    return int.from_bytes(text.encode(), "big") % 0xFFFFFFFF


def _nvml_line(spec: HostSpec, one: LabDevice) -> str:
    groups = [(group, position) for group in spec.devices for position in range(group.count)]
    group, position = groups[one.index]
    major, minor = one.capability.split(".")
    fields = (one.uuid, one.name, one.memory_bytes, major, minor, _bus(one), one.island, group.mig,
              group.faults.get(position, "none"))  # fmt: skip
    return "|".join(map(str, fields)) + "\n"


def _bus(one: LabDevice) -> str:
    return f"00000000:{one.index + 1:02X}:00.0"


def _write_system(root: Path, spec: HostSpec, gpus: list[LabDevice]) -> None:
    """Write the part of /proc and /sys that Powerband reads."""
    files: dict[str, str] = {}
    free = spec.memory if spec.available is None else spec.available
    files["proc/meminfo"] = f"MemTotal: {spec.memory // 1024} kB\nMemAvailable: {free // 1024} kB\n"
    files["proc/cpuinfo"] = f"model name\t: a CPU of the lab\nflags\t\t: {_FLAGS}\n"
    threads = spec.cores * spec.threads_per_core
    files["sys/devices/system/cpu/online"] = f"0-{threads - 1}\n"
    for thread in range(threads):
        siblings = range(thread % spec.cores, threads, spec.cores)
        files[f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"] = ",".join(map(str, siblings))
    for node in range(spec.numa_nodes):
        first, last = (spec.cores * bound // spec.numa_nodes for bound in (node, node + 1))
        ranges = [f"{first + way * spec.cores}-{last - 1 + way * spec.cores}" for way in range(spec.threads_per_core)]
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(ranges)
        total, own = (size // 1024 // spec.numa_nodes for size in (spec.memory, free))
        files[f"sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal: {total} kB\nNode {node} MemFree: {own} kB\n"
            + "".join(f"Node {node} {name}: 0 kB\n" for name in ("Active(file)", "Inactive(file)", "SReclaimable"))
        )
    if spec.cgroup_memory or spec.cgroup_cpus:
        files["proc/self/cgroup"] = "0::/lab\n"
        files["sys/fs/cgroup/lab/memory.max"] = str(spec.cgroup_memory or "max")
        files["sys/fs/cgroup/lab/memory.current"] = "0"
        files["sys/fs/cgroup/lab/cpu.max"] = f"{int(spec.cgroup_cpus * 1e5) if spec.cgroup_cpus else 'max'} 100000"
    amd = [one for one in gpus if one.name.startswith("AMD")]
    for one in gpus:
        files[f"sys/bus/pci/devices/{_bus(one).lower()[-12:]}/numa_node"] = str(one.numa_node)
    for rank, one in enumerate(amd):
        files |= _kfd(rank, one, amd)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _kfd(rank: int, one: LabDevice, amd: list[LabDevice]) -> dict[str, str]:
    """Return the files of an AMD GPU: its node in KFD's topology, after the CPU's, and its DRM device."""
    node, minor = f"sys/class/kfd/kfd/topology/nodes/{rank + 1}", 128 + rank
    device = f"sys/class/drm/renderD{minor}/device"
    properties = {"simd_count": 1216, "gfx_target_version": one.capability, "unique_id": 1000 + rank}
    files = {
        f"{node}/properties": "".join(f"{key} {value}\n" for key, value in properties.items())
        + f"drm_render_minor {minor}\n",
        f"{device}/mem_info_vram_total": str(one.memory_bytes),
        f"{device}/mem_info_vram_used": "0",
        f"{device}/product_name": one.name,
        f"{device}/numa_node": str(one.numa_node),
    }
    for number, other in enumerate(amd):
        kind = _XGMI if other.island == one.island else _PCIE
        if other is not one:
            files[f"{node}/io_links/{number}/properties"] = f"type {kind}\nnode_to {number + 1}\n"
    return files
