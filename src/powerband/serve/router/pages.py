"""An HTTP server for Prometheus (/metrics) and the kubelet's probes (/livez, /readyz)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_MAX_HEAD_BYTES = 16 * 1024
_READ_TIMEOUT_S = 5.0


@contextlib.asynccontextmanager
async def serve_pages(
    host: str, port: int, exposition: Callable[[], bytes], *, ready: Callable[[], bool]
) -> AsyncIterator[None]:
    """Serve the pages while the context is open; each connection gets one answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].partition(b"?")[0] if head.startswith(b"GET ") else b""
            status, body = b"200 OK", b"ok\n"
            if path == b"/metrics":
                body = exposition()
            elif path == b"/readyz" and not ready():
                status, body = b"503 Service Unavailable", b"no endpoint is ready, or another picker leads\n"
            elif path not in (b"/readyz", b"/livez"):
                status, body = b"404 Not Found", b"pages: /metrics, /livez, /readyz\n"
            writer.write(b"HTTP/1.1 %b\r\nContent-Type: text/plain; version=0.0.4\r\n" % status)
            writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_MAX_HEAD_BYTES)
    async with server:
        yield
