"""Trials that run side by side share a machine's devices."""

from __future__ import annotations

import asyncio

from powerband.core.host import Gpu, Host
from powerband.tune.device_pool import DevicePool, side_by_side

GIB = 2**30


def host(gpus: int, cores: int, free_gib: int = 79) -> Host:
    devices = [
        Gpu(index=n, name="H100", memory_bytes=80 * GIB, free_bytes=free_gib * GIB, driver="580", uuid=f"GPU-pool-{n}")
        for n in range(gpus)
    ]
    return Host(
        system="Linux", machine="x86_64", cpu_name="", cores=tuple(range(cores)), memory_bytes=GIB,
        available_bytes=GIB, gpus=tuple(devices),
    )  # fmt: skip


async def test_never_more_devices_than_there_are() -> None:
    pool, held, most = DevicePool(8), 0, 0

    async def trial(count: int) -> None:
        nonlocal held, most
        async with pool.take(count):
            held += count
            most = max(most, held)
            await asyncio.sleep(0)
            held -= count

    await asyncio.gather(*(trial(1 + number % 4) for number in range(40)))
    assert held == 0 and 6 <= most <= 8


async def test_a_large_trial_is_not_starved_by_small_ones() -> None:
    pool, order = DevicePool(4), list[str]()

    async def trial(name: str, count: int) -> None:
        async with pool.take(count):
            order.append(name)
            await asyncio.sleep(0.01)

    await asyncio.gather(trial("small", 1), trial("large", 4), trial("late", 1))
    assert order == ["small", "large", "late"]


async def test_a_cancelled_trial_holds_nothing() -> None:
    pool = DevicePool(2)
    async with pool.take(2):
        waiting = asyncio.create_task(pool.take(1).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), pool.take(2):
        pass


def test_cores_and_free_devices_limit_the_trials() -> None:
    assert side_by_side(host(8, cores=96), smallest=1) == 8
    assert side_by_side(host(8, cores=96), smallest=4) == 2
    assert side_by_side(host(8, cores=16), smallest=1) == 2, "each trial needs cores for its server and its load"
    assert side_by_side(host(8, cores=96, free_gib=40), smallest=1) == 1, "others use the devices"
    assert side_by_side(host(0, cores=64), smallest=1) == 1
