"""Users that cost the client little CPU: bare HTTP/1.1 over sockets, for proofs about speed."""

from __future__ import annotations

import asyncio
import json
import statistics
import time


def body(size: int) -> bytes:
    """Return a streaming request with a prompt of this many bytes, framed for HTTP/1.1."""
    message = {"role": "user", "content": "word " * (size // 5)}
    data = json.dumps({"model": "golden", "messages": [message], "max_tokens": 1, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def user(port: int, request: bytes, count: int, ttft_s: list[float], *, host: str = "127.0.0.1") -> None:
    """Ask so many times, one after the other; add the time to each first token."""
    reader, writer = await asyncio.open_connection(host, port)
    for _ in range(count):
        began = time.monotonic()
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head[:20], head
        await reader.readuntil(b"data: ")
        ttft_s.append(time.monotonic() - began)
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def crowd(port: int, size: int, users: int, count: int) -> tuple[float, float]:
    """Return the requests per second of so many users at once, and the median seconds to a first token."""
    request, ttft_s, began = body(size), list[float](), time.monotonic()
    await asyncio.gather(*(user(port, request, count, ttft_s) for _ in range(users)))
    return users * count / (time.monotonic() - began), statistics.median(ttft_s)


async def paced(port: int, rate_per_s: float, count: int, *, size: int, host: str = "127.0.0.1") -> float:
    """Return the median seconds to a first token of requests at a rate, each on a connection of its own."""
    request, ttft_s, tasks = body(size), list[float](), []
    for _ in range(count):
        tasks.append(asyncio.create_task(user(port, request, 1, ttft_s, host=host)))
        await asyncio.sleep(1 / rate_per_s)
    await asyncio.gather(*tasks)
    return statistics.median(ttft_s)
