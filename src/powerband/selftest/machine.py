"""Checks of the machine without an engine: detection, free memory, placement."""

from __future__ import annotations

import contextlib
import re

import powerband.plan as plan
from powerband.core.allocation import Allocation, Need, NoRoom, share_of_cores
from powerband.core.host import Gpu, Host
from powerband.errors import InputError
from powerband.runtime import devices, gpus, leases
from powerband.selftest.check import Check, Outcome, failed, not_possible, passed

_DEFAULT_SHARE = 0.92  # of a GPU's memory: vLLM's default, which must be free before it starts


def device_name(host: Host) -> str | None:
    """Return the catalogue's name of the machine's device; None: it is not in the catalogue."""
    try:
        return plan.this_machine(host)[0].name
    except InputError:
        return None


async def _detection(host: Host) -> Outcome:
    listed = len({gpu.index for gpu in host.gpus})
    problem = host.gpu_problem or ""
    silent = len(set(re.findall(r"GPU (\d+) ", problem)))
    if problem and not silent:
        return failed("driver unreachable", detail=problem)
    if silent:
        return failed("GPU not answering", detail=problem, silent=silent, listed=listed + silent)
    if unknown := [gpu for gpu in host.gpus if gpu.unknown]:
        detail = "; ".join(f"GPU {gpu.index}: {', '.join(gpu.unknown)}" for gpu in unknown)
        return failed("fact unknown", detail=detail, gpus=len(unknown), listed=listed)
    if device_name(host) is None:
        return failed("device unknown", detail=", ".join({gpu.name for gpu in host.gpus}), gpus=len(host.gpus))
    return passed(gpus=len(host.gpus), cores=len(host.cores))


async def _free_memory(host: Host) -> Outcome:
    if not host.gpus:
        return not_possible("no GPU")
    held = leases.held(host)
    used = [gpu for gpu in host.gpus if gpu.id not in held and gpu.free_bytes < _DEFAULT_SHARE * gpu.memory_bytes]
    if used:
        most = max(used, key=lambda gpu: gpu.memory_bytes - gpu.free_bytes)
        return failed(
            "memory in use",
            detail=f"GPUs {', '.join(str(gpu.index) for gpu in used)}; 'nvidia-smi' lists their processes",
            gpus=len(used),
            listed=len(host.gpus),
            used_bytes=most.memory_bytes - most.free_bytes,
        )
    return passed(gpus=len(host.gpus), held=sum(gpu.id in held for gpu in host.gpus))


async def _placement(host: Host) -> Outcome:
    return _placed_on_gpus(host) if host.gpus else _placed_on_cores(host)


def _placed_on_gpus(host: Host) -> Outcome:
    """Hold all free GPUs, one for each replica."""
    free = len(host.gpus) - len(set(leases.held(host)) & {gpu.id for gpu in host.gpus})
    if not free:
        return not_possible("no free devices")
    found = _held_together(host, Need(devices=1), most=free + 1)
    units = [unit for one in found for unit in one.units]
    if len(units) != len(set(units)) or len(found) > free:
        return failed("units shared", replicas=len(found), devices=free)
    if len(found) < free:
        return failed("no free devices", replicas=len(found), devices=free)
    if wrong := [one for one in found if not _cores_are_near(host, one)]:
        return failed("wrong cores", replicas=len(wrong), devices=free)
    if wrong_gpus := [gpu for gpu in host.gpus if not _selects_itself(gpu)]:
        return failed("selection differs", gpus=len(wrong_gpus), devices=free)
    return passed(replicas=len(found), devices=free)


def _placed_on_cores(host: Host) -> Outcome:
    share = share_of_cores(host, 2)
    if share is None or len(host.core_threads or host.cores) < 2:
        return not_possible("too few devices", cores=len(host.cores))
    found = _held_together(host, Need(cores=share), most=2)
    if any(not one.cores for one in found):
        return not_possible("no free devices")
    if set(found[0].cores) & set(found[1].cores):
        return failed("units shared", replicas=2)
    return passed(replicas=2, cores=share)


def _held_together(host: Host, need: Need, *, most: int) -> list[Allocation]:
    """Return the allocations of replicas that hold their devices at the same time."""
    found = []
    with contextlib.ExitStack() as stack, contextlib.suppress(NoRoom):
        for _ in range(most):
            found.append(stack.enter_context(leases.acquire(host, need, name="selftest")).allocation)
    return found


def _cores_are_near(host: Host, one: Allocation) -> bool:
    near = {core for gpu in one.gpus for node in host.numa_nodes if node.index == gpu.numa_node for core in node.cores}
    return not near or set(one.cores) <= near


def _selects_itself(gpu: Gpu) -> bool:
    """Return whether a process that is shown only this GPU finds this GPU."""
    shown = gpus.selection([gpu])
    found, _ = gpus.visible(devices.system_root(), shown)
    return not shown or [one.id for one in found] == [gpu.id]


CHECKS = (
    Check("detection", "every GPU answers, and the catalogue knows it", _detection),
    Check("free memory", "no other process uses GPU memory", _free_memory),
    Check("placement", "replicas get devices or cores of their own", _placement),
)
