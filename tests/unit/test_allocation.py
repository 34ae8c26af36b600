"""Replicas get disjoint devices and cores that are near each other."""

from __future__ import annotations

from typing import Any

import pytest

from powerband.core.allocation import Need, NoRoom, allocate, capacity, share_of_cores
from powerband.core.host import Gpu, Host, NumaNode

GIB = 2**30


def host(*gpus: Gpu, cores: int = 16, nodes: int = 1, threads: int = 1) -> Host:
    """Return a host whose cores are divided among its NUMA nodes."""
    every = tuple(range(cores * threads))
    siblings = tuple(tuple(core + way * cores for way in range(threads)) for core in range(cores))
    size = cores // nodes
    numa = tuple(
        NumaNode(
            index=node,
            cores=tuple(core for core in every if core % cores // size == node),
            memory_bytes=GIB,
            available_bytes=GIB,
        )
        for node in range(nodes)
    )
    return Host(
        system="Linux", machine="x86_64", cpu_name="", cores=every, core_threads=siblings, numa_nodes=numa,
        memory_bytes=GIB, available_bytes=GIB, gpus=gpus,
    )  # fmt: skip


def gpu(index: int, **changes: Any) -> Gpu:
    """Return a free H100; four share an island."""
    data = {"name": "H100", "memory_bytes": 80 * GIB, "free_bytes": 79 * GIB, "driver": "580", "island": index // 4}
    return Gpu(index=index, uuid=f"GPU-{index}", **data | changes)


def indices(where: Host, need: Need, *taken: int) -> list[int]:
    return [one.index for one in allocate(where, need, taken={f"GPU-{number}" for number in taken}).gpus]


EIGHT = host(*(gpu(number, numa_node=number // 4) for number in range(8)), nodes=2)


def test_replicas_of_one_device_fill_one_island_first() -> None:
    """So that the other island stays whole for a larger replica."""
    taken: list[int] = []
    for _ in range(5):
        taken += indices(EIGHT, Need(devices=1), *taken)
    assert taken == [0, 1, 2, 3, 4]
    assert indices(EIGHT, Need(devices=4), 0) == [4, 5, 6, 7]


def test_a_replica_stays_in_one_island_and_spans_them_only_if_it_must() -> None:
    assert indices(EIGHT, Need(devices=2), 0, 1, 2) == [4, 5]
    assert indices(EIGHT, Need(devices=4), 0, 4) == [1, 2, 3, 5], "three of one island and one of the other"
    assert sorted(indices(EIGHT, Need(devices=8))) == list(range(8))
    assert len(indices(EIGHT, Need(devices=6), 0, 7)) == 6


def test_devices_of_two_kinds_are_not_mixed() -> None:
    mixed = host(gpu(0), gpu(1), gpu(2, name="L40S"), gpu(3, name="L40S"))
    assert indices(mixed, Need(devices=2), 0) == [2, 3]
    with pytest.raises(NoRoom, match="of 2 kinds: H100, L40S"):
        allocate(mixed, Need(devices=3), taken={"GPU-0"})


def test_memory_that_others_use_is_left_alone() -> None:
    shared = host(gpu(0, free_bytes=10 * GIB), gpu(1))
    assert indices(shared, Need(devices=1, free_bytes=70 * GIB)) == [1]
    with pytest.raises(NoRoom, match=r"needs 2 GPUs with 70.0 GiB free; 1 of 2 can be used \(1 with at most 10.0 GiB"):
        allocate(shared, Need(devices=2, free_bytes=70 * GIB))


def test_only_allowed_devices_are_chosen_and_the_message_counts_held_ones() -> None:
    assert indices(EIGHT, Need(devices=1, allowed=(5, 6)), 5) == [6]
    with pytest.raises(NoRoom, match="2 held by other replicas"):
        allocate(EIGHT, Need(devices=1, allowed=(5, 6)), taken={"GPU-5", "GPU-6"})
    with pytest.raises(NoRoom, match="0 of 0 can be used"):
        allocate(EIGHT, Need(devices=1, allowed=(11,)))


def test_capacity_counts_replicas() -> None:
    assert capacity(EIGHT, Need(devices=2)) == 4
    assert capacity(EIGHT, Need(devices=4), taken={"GPU-1"}) == 1
    assert capacity(EIGHT, Need(devices=16)) == 0


def test_a_gpu_server_process_gets_its_share_of_the_near_cores() -> None:
    found = [allocate(EIGHT, Need(devices=1, allowed=(number,))).cores for number in range(8)]
    assert found[0] == (0, 1) and found[4] == (8, 9)
    assert len({core for cores in found for core in cores}) == 16


def test_cores_of_cpu_replicas_are_whole_disjoint_and_of_one_node() -> None:
    large, taken = host(cores=8, nodes=2, threads=2), set[str]()
    need = Need(cores=share_of_cores(large, 2))
    first = allocate(large, need, taken=taken)
    assert first.cores == (0, 1, 2, 3, 8, 9, 10, 11), "both threads of four cores of node 0"
    second = allocate(large, need, taken=set(first.units))
    assert second.cores == (4, 5, 6, 7, 12, 13, 14, 15)
    third = allocate(large, need, taken={*first.units, *second.units})
    assert third.cores == (), "no core is free: it shares all of them"
    assert share_of_cores(large, 1) is None
