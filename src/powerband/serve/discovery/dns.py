"""Endpoints from DNS: every address of a headless name, for Compose, Nomad, ECS and plain Kubernetes Services."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass

from powerband.serve.discovery import Discovered, OnChange

_POLL_S = 1.0


@dataclass(frozen=True)
class HeadlessName:
    """A name that resolves to one address for each endpoint, and their port."""

    name: str
    port: int

    async def watch(self, on_change: OnChange) -> None:
        """Report the addresses of the name; one that cannot be resolved any more keeps its last ones."""
        last: list[Discovered] | None = None
        while True:
            try:
                if (found := await self._resolve()) != last:
                    last = found
                    on_change(found)
            except socket.gaierror as error:
                if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)) and last:
                    last = []  # the server has answered that there is no address
                    on_change(last)
                elif last is None:
                    print(f"warning: {self.name} cannot be resolved: {error}", file=sys.stderr, flush=True)
                    last = []
            await asyncio.sleep(_POLL_S)

    async def _resolve(self) -> list[Discovered]:
        loop = asyncio.get_running_loop()
        rows = await loop.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        hosts = sorted({f"[{row[4][0]}]" if row[0] == socket.AF_INET6 else str(row[4][0]) for row in rows})
        return [Discovered(f"{host}:{self.port}", f"{host}:{self.port}") for host in hosts]
