"""The lab's server: the answers, errors and metrics of vLLM and llama.cpp's server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import pytest

from powerband import engines
from powerband.testing.lab.batching import Batching, PagedCache, SlotCache
from powerband.testing.lab.server import serve
from powerband.testing.lab.truth import Curve, StepTimes
from support.golden import free_port

STEP_S, PREFILL_S, REQUEST_S = 0.02, 0.0002, 0.03
TIMES = StepTimes((Curve(0.0, (0.0,), (math.log(STEP_S),)),), prefill_s_per_token=PREFILL_S, request_s=REQUEST_S)
CONTEXT = 512
PROMPT = "one two six ten " * 24 + "one two six ten"  # 100 tokens
LONG = " ".join([PROMPT] * 6)


@contextlib.asynccontextmanager
async def running(
    flavour: Literal["vllm", "llamacpp"] = "vllm", *, time_scale: float = 0.1, sequences: int = 8
) -> AsyncIterator[httpx.AsyncClient]:
    cache = (
        PagedCache(blocks=200)
        if flavour == "vllm"
        else SlotCache(slots=sequences, context_per_slot=CONTEXT)
    )  # fmt: skip
    batching = Batching(TIMES, cache, max_batched_tokens=2048, max_sequences=sequences)
    port, ready = free_port(), asyncio.Event()
    task = asyncio.create_task(
        serve(
            batching, host="127.0.0.1", port=port, model="m", flavour=flavour, context_tokens=CONTEXT,
            time_scale=time_scale, on_ready=ready.set,
        )
    )  # fmt: skip
    try:
        await asyncio.wait_for(ready.wait(), 10)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=60) as client:
            yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[tuple[float, Any]]:
    """Return the events of a stream with the time of each."""
    found: list[tuple[float, Any]] = []
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        async for line in answer.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                found.append((time.monotonic(), data if data == "[DONE]" else json.loads(data)))
    return found


async def gauges(client: httpx.AsyncClient, name: str) -> Any:
    engine = engines.get(name)
    pages = {path: (await client.get(path)).text for path in engine.gauge_pages}
    return engine.gauges(pages)


async def gauges_at(client: httpx.AsyncClient, name: str, *, running: int, queue_depth: int) -> Any:
    """Return the gauges as soon as this many requests run and wait."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        found = await gauges(client, name)
        if (found.running, found.queue_depth) == (running, queue_depth):
            return found
    raise AssertionError(found)


@pytest.mark.quiet
async def test_a_chat_is_streamed_on_schedule_with_its_usage() -> None:
    async with running(time_scale=1.0) as client:
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 10,
            "stream_options": {"include_usage": True},
        }
        begun = time.monotonic()
        *chunks, (_, usage), (_, done) = await events(client, "/v1/chat/completions", body)
    assert done == "[DONE]" and usage["choices"] == []
    prompt = usage["usage"]["prompt_tokens"]
    assert usage["usage"]["completion_tokens"] == 10 and 100 < prompt < 130
    assert [one["choices"][0]["finish_reason"] for _, one in chunks] == [None] * 9 + ["length"]
    assert "".join(one["choices"][0]["delta"]["content"] for _, one in chunks).split()[:3] == ["the", "load", "was"]
    ttft = chunks[0][0] - begun
    assert ttft == pytest.approx(REQUEST_S + STEP_S + prompt * PREFILL_S, abs=0.03)
    assert chunks[-1][0] - chunks[0][0] == pytest.approx(9 * STEP_S, abs=0.03)


async def test_an_answer_without_stream() -> None:
    async with running() as client:
        answer = (await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})).json()
        assert answer["choices"][0] == {"index": 0, "finish_reason": "length", "text": " the load was"}
        assert answer["usage"]["total_tokens"] == 103
        answer = (await client.post("/v1/completions", json={"prompt": [5, 6, 7]})).json()
        assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 16


async def test_vllm_reports_the_prefix_cache_and_its_load() -> None:
    async with running(sequences=2) as client:
        assert (await client.get("/health")).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 5}
        for _ in range(2):
            await client.post("/v1/completions", json=body)
        quiet = await gauges(client, "vllm")
        assert (quiet.running, quiet.queue_depth, quiet.kv_use) == (0, 0, 0)
        assert (quiet.prefix_queries_tokens, quiet.prefix_hits_tokens) == (200, 96), "six blocks of 16 tokens"
        assert (quiet.prompt_tokens, quiet.output_tokens, quiet.preemptions) == (200, 10, 0)
        assert quiet.ttft_count == 2 and quiet.ttft_total_s > 2 * 0.1 * (REQUEST_S + STEP_S)
        long = [asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 300})) for _ in range(3)]
        busy = await gauges_at(client, "vllm", running=2, queue_depth=1)
        assert 8 / 200 <= busy.kv_use <= 46 / 200, "six shared blocks, and one to twenty of each answer"
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await gauges_at(client, "vllm", running=0, queue_depth=0)  # requests of closed connections are aborted


async def test_vllm_tokenizes_texts_and_chats_and_lists_its_model() -> None:
    async with running() as client:
        text = (await client.post("/tokenize", json={"model": "m", "prompt": PROMPT})).json()
        assert len(text["tokens"]) == text["count"] == 100
        chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "add_generation_prompt": True}
        rendered = (await client.post("/tokenize", json=chat)).json()["tokens"]
        assert len(rendered) > 100 and rendered == (await client.post("/tokenize", json=chat)).json()["tokens"]
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await client.get("/slots")).status_code == 404


async def test_vllm_refuses_what_does_not_fit() -> None:
    async with running() as client:
        long = await client.post("/v1/completions", json={"prompt": LONG, "max_tokens": 5})
        assert long.status_code == 400
        assert long.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens. However,")
        many = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 600})
        assert many.status_code == 400 and "cannot be greater than max_model_len=512" in many.text
        clipped = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 500})
        assert clipped.json()["usage"]["completion_tokens"] == 412
        broken = await client.post("/v1/completions", content=b"{not json")
        assert broken.status_code == 400


async def test_llamacpp_has_slots_with_their_own_context() -> None:
    async with running("llamacpp", sequences=2) as client:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}
        for _ in range(2):
            answer = (await client.post("/v1/chat/completions", json=body)).json()
        prompt = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
        found = await gauges(client, "llamacpp")
        assert (found.prompt_tokens, found.prefix_hits_tokens) == (2 * prompt, prompt - 1)
        assert (found.output_tokens, found.running, found.queue_depth, found.kv_use) == (10, 0, 0, 0)
        long = await client.post("/v1/completions", json={"prompt": LONG})
        assert long.status_code == 400
        assert long.json()["error"]["type"] == "exceed_context_size_error"
        assert long.json()["error"]["message"] == (
            "request (600 tokens) exceeds the available context size (512 tokens), try increasing it"
        )
        clipped = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1000})
        assert clipped.json()["usage"]["total_tokens"] == 512
        rendered = (await client.post("/apply-template", json={"messages": body["messages"]})).json()["prompt"]
        tokens = (await client.post("/tokenize", json={"content": rendered})).json()["tokens"]
        assert len(tokens) == prompt
        props = (await client.get("/props")).json()
        assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == 512


async def test_llamacpp_counts_busy_slots() -> None:
    async with running("llamacpp", sequences=2) as client:
        bodies = [{"prompt": f"{n} {PROMPT}", "max_tokens": 300} for n in range(3)]
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        busy = await gauges_at(client, "llamacpp", running=2, queue_depth=1)
        assert 200 / 1024 < busy.kv_use <= 802 / 1024
        for answer in await asyncio.gather(*tasks):
            assert answer.json()["usage"]["completion_tokens"] == 300


async def raw_stream(port: int, number: int) -> int:
    """Send one request over a connection of its own, and return the tokens of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": str(number), "max_tokens": 20, "ignore_eos": True, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    data = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return data.count(b'"text": "')


async def test_three_hundred_streams_at_once() -> None:
    async with running(time_scale=1.0, sequences=300) as client:
        port = client.base_url.port
        assert port
        begun = time.monotonic()
        counts = await asyncio.gather(*(raw_stream(port, number) for number in range(300)))
        assert time.monotonic() - begun < 10, "30 ms, a prefill of 0.2 ms for each, and 20 steps of 20 ms: 0.5 s"
        found = await gauges(client, "vllm")
    assert counts == [20] * 300
    assert found.output_tokens == 6000
