"""An HTTP server for Prometheus: GET /metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_MAX_HEAD_BYTES = 16 * 1024
_READ_TIMEOUT_S = 5.0


@contextlib.asynccontextmanager
async def serve_metrics(host: str, port: int, exposition: Callable[[], bytes]) -> AsyncIterator[None]:
    """Serve the metrics while the context is open; each connection gets one answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /metrics "):
                body = exposition()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n")
            else:
                body = b"the metrics are at /metrics\n"
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\n")
            writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_MAX_HEAD_BYTES)
    async with server:
        yield
