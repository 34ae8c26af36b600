"""One set of gauges: the same load and the same assertions on both engines."""

import asyncio
from typing import Any

import pytest

from powerband.core.engine import Gauges
from support.engines import long_prompt, started

PLACES = 2  # how many requests each engine may run at once
ANSWER = 128  # tokens: long enough to be seen at it
KNOBS: dict[str, dict[str, Any]] = {"llamacpp": {"parallel": PLACES}, "vllm": {"max_num_seqs": PLACES}}


@pytest.mark.parametrize(
    "engine",
    [pytest.param("llamacpp", marks=pytest.mark.llamacpp), pytest.param("vllm", marks=pytest.mark.vllm)],
)
async def test_the_same_load_moves_the_same_gauges(engine: str) -> None:
    async with started(engine, **KNOBS[engine]) as server:
        before = await server.replica.gauges()
        work = [
            asyncio.create_task(server.complete(long_prompt(400), max_tokens=ANSWER, ignore_eos=True)) for _ in range(5)
        ]
        seen: list[Gauges] = []
        while not all(one.done() for one in work):
            seen.append(await server.replica.gauges())
            await asyncio.sleep(0.02)
        answers = [await one for one in work]
        after = await server.replica.gauges()

    assert all(answer.status == 200 for answer in answers)
    assert max(g.running or 0 for g in seen) == PLACES
    assert max(g.queue_depth or 0 for g in seen) >= 5 - PLACES - 1
    assert 0 < max(g.kv_use or 0 for g in seen) <= 1

    def grown(name: str) -> float:
        first, last = getattr(before, name), getattr(after, name)
        assert first is not None and last is not None, name
        return float(last - first)

    prompt = grown("prompt_tokens")
    assert grown("output_tokens") == 5 * ANSWER
    assert 5 * 400 < prompt < 5 * 800
    assert grown("prefix_queries_tokens") == prompt
    assert 0.3 * prompt < grown("prefix_hits_tokens") < 0.9 * prompt  # the first ones at once find nothing yet
    assert (after.running, after.queue_depth) == (0, 0)
