"""A host of the lab, as its stand-ins see it: the devices that the environment shows them, with accounted memory.

The folder of a host, in the environment variable POWERBAND_LAB, has `host.json` and one file for each device, which
lists the processes that hold its memory, one `pid bytes` a line. A claim ends when its process does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "POWERBAND_LAB"


class OutOfDeviceMemory(Exception):
    """A claim was larger than the free memory."""

    def __init__(self, device: LabDevice, asked_bytes: int, free_bytes: int) -> None:
        super().__init__(f"device {device.index}: {asked_bytes} bytes asked, {free_bytes} free")
        self.device, self.asked_bytes, self.free_bytes = device, asked_bytes, free_bytes


@dataclass(frozen=True)
class LabDevice:
    """One simulated device."""

    index: int  # on its host
    uuid: str
    device: str  # its name in the catalogue
    name: str  # as its driver reports it
    memory_bytes: int
    capability: str  # CUDA compute capability
    numa_node: int
    island: int  # devices of one island have fast links
    slowdown: float = 1.0  # of its steps


class LabHost:
    """A simulated host."""

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "host.json").read_text())
        self.folder = folder
        self.name: str = data["name"]
        self.seed: int = data["seed"]
        self.time_scale: float = data["time_scale"]  # durations are multiplied by it
        self.start_scale: float = data.get("start_scale", self.time_scale)
        self.ignored_options = frozenset[str](data.get("ignored_options", ()))  # accepted, and not applied
        self.hidden_metrics = frozenset[str](data.get("hidden_metrics", ()))  # not exported
        self.load_bytes_per_s: float = data["load_bytes_per_s"]  # at which weights are read
        self.devices = tuple(LabDevice(**one) for one in data["devices"])

    @classmethod
    def current(cls) -> LabHost:
        """Return the host of this process."""
        return cls(Path(os.environ[ENVIRONMENT]))

    def visible(self, environment: Mapping[str, str] = os.environ) -> list[LabDevice]:
        """Return the devices that CUDA_VISIBLE_DEVICES shows, in its order; the list ends at the first unknown one."""
        names = environment.get("CUDA_VISIBLE_DEVICES")
        if names is None:
            return list(self.devices)
        found: list[LabDevice] = []
        for name in (one.strip() for one in names.split(",")):
            able = [one for one in self.devices if name and (name == str(one.index) or one.uuid.startswith(name))]
            if len(able) != 1:
                break
            if able[0] in found:  # CUDA refuses duplicates
                return []
            found += able
        return found

    def free_bytes(self, device: LabDevice) -> int:
        """Return the memory that no running process holds."""
        with self._claims(device) as claims:
            return device.memory_bytes - sum(claims.values())

    def holders(self, device: LabDevice) -> dict[int, int]:
        """Return the bytes that each running process holds."""
        with self._claims(device) as claims:
            return dict(claims)

    def claim(self, device: LabDevice, size_bytes: int, *, pid: int | None = None) -> None:
        """Add to the memory that a process holds, until it ends; by default this process."""
        pid = pid or os.getpid()
        with self._claims(device) as claims:
            free_bytes = device.memory_bytes - sum(claims.values())
            if size_bytes > free_bytes:
                raise OutOfDeviceMemory(device, size_bytes, free_bytes)
            claims[pid] = claims.get(pid, 0) + size_bytes

    @contextlib.contextmanager
    def _claims(self, device: LabDevice) -> Iterator[dict[int, int]]:
        """Lock the claims of a device, without those of ended processes, and write them back."""
        with (self.folder / "devices" / device.uuid).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = [line.split() for line in file.read().splitlines()]
            claims = {int(pid): int(size) for pid, size in lines if _running(int(pid))}
            yield claims
            file.truncate(0)
            file.write("".join(f"{pid} {size}\n" for pid, size in claims.items()))


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
