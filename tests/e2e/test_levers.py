"""A few levers on both engines; proofs/engines-levers has the whole table."""

import asyncio
from typing import Any

import pytest

from powerband import engines
from powerband.errors import DeploymentRefused, EngineFailed
from support import models
from support.engines import started

COUNT = " ".join(["one two three four five six seven eight nine ten."] * 12)
BY_BATCH = ((1, 2, 4), (3, 256, 0))  # from so many at once, to so many, so many drafts


@pytest.mark.parametrize(
    ("engine", "knobs"),
    [
        pytest.param(
            "llamacpp", {"spec_type": ["ngram-simple"], "spec_ngram_simple_size_n": 4}, marks=pytest.mark.llamacpp
        ),
        pytest.param("vllm", engines.get("vllm").drafts_by_batch(BY_BATCH), marks=pytest.mark.vllm),
    ],
)
async def test_ngram_speculation_drafts_and_accepts(engine: str, knobs: dict[str, Any]) -> None:
    async with started(engine, **knobs) as server:
        await server.complete(COUNT, max_tokens=96, ignore_eos=True)
        gauges = await server.replica.gauges()
    assert (gauges.spec_drafted_tokens or 0) > 0
    assert (gauges.spec_accepted_tokens or 0) > 0


@pytest.mark.llamacpp
async def test_two_adapters_answer_differently() -> None:
    model = models.smollm2()
    async with started("llamacpp", lora=[str(model.lora_gguf(1)), str(model.lora_gguf(2))]) as server:
        scales = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        asks = [[{"id": i, "scale": scale} for i, scale in enumerate(pair)] for pair in scales]
        answers = [(await server.complete("Once upon a time", lora=ask)).text for ask in asks]
    assert len(set(answers)) == 3


@pytest.mark.vllm
async def test_a_queue_bound_refuses_and_is_counted() -> None:
    async with started("vllm", max_num_queued_reqs=2, max_num_seqs=1) as server:
        answers = await asyncio.gather(*(server.complete(f"{i} once upon a time", max_tokens=48) for i in range(6)))
        gauges = await server.replica.gauges()
    assert [answer.status for answer in answers].count(503) >= 3
    assert (gauges.refused_requests or 0) >= 3


@pytest.mark.llamacpp
async def test_a_draft_that_would_be_ignored_is_a_failure() -> None:
    """llama-server logs an error, becomes healthy and serves without speculation: that is not what was asked for."""
    knobs: dict[str, Any] = {"spec_type": ["draft-eagle3"], "spec_draft_model": str(models.smollm2().gguf)}
    with pytest.raises(EngineFailed) as caught:
        async with started("llamacpp", **knobs):
            pytest.fail("it must not count as ready")
    assert caught.value.failure == "lever_ignored"
    assert "disabled speculation" in caught.value.message


@pytest.mark.vllm
async def test_a_conflict_is_refused_before_anything_starts() -> None:
    with pytest.raises(DeploymentRefused, match="does not divide the model's 9 attention heads"):
        async with started("vllm", tensor_parallel_size=2):
            pytest.fail("it must not start")
