"""Virtual time: sleeps take none, and concurrent tasks keep their order."""

from __future__ import annotations

import asyncio
import time

from powerband.tune import virtual_time


def test_sleeps_take_no_real_time_and_overlap() -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        await asyncio.gather(sleeper("long", 7200), sleeper("short", 60), sleeper("middle", 3600))
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert virtual_time.run(main()) == 7200
    assert time.monotonic() - began < 5
    assert order == [("short", 60), ("middle", 3600), ("long", 7200)]


def test_timeouts_are_virtual_too() -> None:
    async def main() -> str:
        try:
            async with asyncio.timeout(100):
                await asyncio.sleep(1000)
        except TimeoutError:
            return f"{asyncio.get_running_loop().time():.0f}"
        return "no timeout"

    assert virtual_time.run(main()) == "100"
