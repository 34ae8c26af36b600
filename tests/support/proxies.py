"""A TCP proxy whose connections can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from support.golden import free_port


class TcpProxy:
    """Passes bytes on to a port of 127.0.0.1."""

    def __init__(self, target: int) -> None:
        self.port, self._target = free_port(), target
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()

    def cut(self) -> None:
        """Reset all connections."""

        def reset() -> None:
            for one in list(self._writers):
                one.transport.abort()

        self._loop.call_soon_threadsafe(reset)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        self._writers -= {writer, back}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _main(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        async with server:
            await server.serve_forever()

    def run(self) -> None:
        """Serve until `stop`."""
        with contextlib.suppress(asyncio.CancelledError):
            self._task = self._loop.create_task(self._main())
            self._loop.run_until_complete(self._task)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)


@contextlib.contextmanager
def tcp_proxy(target: int) -> Iterator[TcpProxy]:
    """Run a proxy in front of a port."""
    proxy = TcpProxy(target)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(5)
