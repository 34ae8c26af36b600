"""Choose the devices and cores of a replica: disjoint from those of others, and near each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pydantic import Field

from powerband.core.document import Value
from powerband.core.host import Gpu, Host
from powerband.core.units import about_bytes
from powerband.errors import DeploymentRefused


class Need(Value):
    """What one replica occupies."""

    devices: int = 0
    free_bytes: int = Field(default=0, description="memory that must be free on each device")
    free_share: float = Field(default=0.0, description="share of each device's memory that must be free")
    allowed: tuple[int, ...] | None = Field(default=None, description="indices of the devices to choose from")
    cores: int | None = Field(default=None, description="cores without a device; None: all, shared with others")


class Allocation(Value):
    """The devices and cores of one replica."""

    gpus: tuple[Gpu, ...] = ()
    cores: tuple[int, ...] = Field(default=(), description="hardware threads to run on; empty: all")

    @property
    def units(self) -> tuple[str, ...]:
        """Return the names of what nobody else may use."""
        return (*(gpu.id for gpu in self.gpus), *((f"core-{core}" for core in self.cores) if not self.gpus else ()))


class NoRoom(DeploymentRefused):
    """Too few devices are free for one more replica."""


def units(host: Host) -> tuple[str, ...]:
    """Return the names of all devices and cores of a host."""
    return (*(gpu.id for gpu in host.gpus), *(f"core-{core}" for core in host.cores))


def allocate(host: Host, need: Need, *, taken: Collection[str] = ()) -> Allocation:
    """Return devices and cores that are not taken; raise NoRoom if too few devices are free.

    Devices of one kind and one island come first, and the island with the fewest free devices that has enough. Cores of
    a CPU replica are whole cores of one NUMA node where possible; if too few are free, the replica runs on all cores.
    """
    if not need.devices:
        return Allocation(cores=_free_cores(host, need.cores, taken) if need.cores else ())
    able = [gpu for gpu in host.gpus if need.allowed is None or gpu.index in need.allowed]
    free = [gpu for gpu in able if gpu.id not in taken and _enough(gpu, need)]
    groups = [group for kind in _groups(free, lambda gpu: gpu.name) for group in _near(kind)]
    fitting = [group for group in groups if len(group) >= need.devices]
    if not fitting:
        raise _no_room(need, able, free, taken)
    rank = {id(group): number for number, group in enumerate(groups)}
    best = min(fitting, key=lambda group: (_spread(group, need.devices), len(group), rank[id(group)]))
    chosen = _closest(best, need.devices)
    return Allocation(gpus=tuple(chosen), cores=_cores_near(host, chosen))


def capacity(host: Host, need: Need, *, taken: Collection[str] = ()) -> int:
    """Return how many replicas with these devices fit."""
    held, count = set(taken), 0
    while need.devices:
        try:
            held.update(allocate(host, need, taken=held).units)
        except NoRoom:
            return count
        count += 1
    return len(host.cores) // max(1, need.cores or 1)


def share_of_cores(host: Host, replicas: int) -> int | None:
    """Return the cores for each of several replicas without devices; None: one replica has all."""
    return max(1, len(_threads(host)) // replicas) if replicas > 1 else None


def _enough(gpu: Gpu, need: Need) -> bool:
    """Return whether a device has the memory free: a share of its memory, if any, of which the bytes are a part."""
    share_bytes = int(need.free_share * gpu.memory_bytes)
    return gpu.free_bytes >= max(share_bytes, need.free_bytes) and need.free_bytes <= (share_bytes or need.free_bytes)


def _groups(gpus: Iterable[Gpu], name: object) -> list[list[Gpu]]:
    found: dict[object, list[Gpu]] = {}
    for gpu in gpus:
        found.setdefault(name(gpu), []).append(gpu)  # type: ignore[operator]
    return list(found.values())


def _near(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Return the islands of devices of one kind, then all of them."""
    islands = _groups(gpus, lambda gpu: gpu.island if gpu.island is not None else ("node", gpu.numa_node))
    return [*islands, list(gpus)] if len(islands) > 1 else islands


def _spread(group: Sequence[Gpu], count: int) -> int:
    """Return how many islands the closest devices of a group are in."""
    return len({gpu.island for gpu in _closest(group, count)})


def _closest(group: Sequence[Gpu], count: int) -> list[Gpu]:
    """Return devices of as few islands and NUMA nodes as possible, from the fullest place that has enough."""
    for place in ("numa_node", "island"):
        nodes = [node for node in _groups(group, lambda gpu, place=place: getattr(gpu, place)) if len(node) >= count]
        if nodes:
            return min(nodes, key=len)[:count]
    islands = sorted(_groups(group, lambda gpu: gpu.island), key=len, reverse=True)
    return [gpu for island in islands for gpu in island][:count]


def _cores_near(host: Host, gpus: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the cores of each device's NUMA node, divided among the devices of that node."""
    cores: list[int] = []
    for gpu in gpus:
        node = next((one for one in host.numa_nodes if one.index == gpu.numa_node), None)
        usable = [core for core in node.cores if core in host.cores] if node else []
        beside = [one.id for one in host.gpus if one.numa_node == gpu.numa_node]
        share = len(usable) // len(beside)
        cores += usable[(rank := beside.index(gpu.id)) * share : (rank + 1) * share]
    return tuple(sorted(cores)) if len(host.numa_nodes) > 1 else ()


def _threads(host: Host) -> tuple[tuple[int, ...], ...]:
    return host.core_threads or tuple((core,) for core in host.cores)


def _free_cores(host: Host, count: int, taken: Collection[str]) -> tuple[int, ...]:
    """Return the hardware threads of free cores, of one NUMA node where possible; empty if too few are free."""
    free = [threads for threads in _threads(host) if not any(f"core-{one}" in taken for one in threads)]
    nodes = [[threads for threads in free if threads[0] in node.cores] for node in host.numa_nodes]
    fitting = [node for node in (*nodes, free) if len(node) >= count]
    return tuple(sorted(one for threads in min(fitting, key=len)[:count] for one in threads)) if fitting else ()


def _no_room(need: Need, able: Sequence[Gpu], free: Sequence[Gpu], taken: Collection[str]) -> NoRoom:
    held = [gpu for gpu in able if gpu.id in taken]
    small = [gpu for gpu in able if gpu not in held and gpu not in free]
    share = f", {need.free_share:.0%} of its memory" if need.free_share else ""
    memory = f" with {about_bytes(need.free_bytes)}{share} free" if need.free_bytes else ""
    why = [f"{len(held)} held by other replicas"] if held else []
    if small:
        most = max(small, key=lambda gpu: gpu.free_bytes)
        why.append(f"{len(small)} with at most {about_bytes(most.free_bytes)} free of {about_bytes(most.memory_bytes)}")
    kinds = {gpu.name for gpu in free}
    if len(free) >= need.devices and len(kinds) > 1:
        why.append(f"the free ones are of {len(kinds)} kinds: {', '.join(sorted(kinds))}")
    reasons = f" ({'; '.join(why)})" if why else ""
    one = "GPU" if need.devices == 1 else "GPUs"
    if not able:
        reasons, hint = "", "give the indices of GPUs that 'powerband doctor' lists"
    elif held:
        hint = "stop a replica ('powerband doctor' lists who holds which GPU), or use fewer GPUs per replica"
    elif small:
        hint = "free the GPUs ('nvidia-smi' lists their processes), or use a smaller model, scheme or context"
    else:
        hint = f"use at most {len(free)} GPUs per replica, for example with tensor_parallel_size {max(1, len(free))}"
    return NoRoom(
        f"a replica needs {need.devices} {one}{memory}; {len(free)} of {len(able)} can be used{reasons}", hint=hint
    )
