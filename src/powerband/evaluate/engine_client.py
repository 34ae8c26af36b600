"""HTTP client of a running engine: runs the exchanges that its adapter defines, several concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import httpx

from powerband.core.scoring import Exchange
from powerband.engines.base import Engine
from powerband.errors import EngineFailed
from powerband.runtime.replica import Replica

T = TypeVar("T")
_TIMEOUT_S = 300.0


class EngineClient:
    """Sends requests to one running engine."""

    def __init__(self, replica: Replica, model: str, *, concurrency: int) -> None:
        self.engine: Engine[Any] = replica.engine
        self.url, self.model, self.concurrency = replica.url, model, concurrency
        limits = httpx.Limits(max_keepalive_connections=concurrency if replica.engine.keep_alive else 0)
        self._http = httpx.AsyncClient(
            base_url=replica.url, headers=replica.request_headers, timeout=_TIMEOUT_S, limits=limits
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def run(self, exchange: Exchange[T]) -> T:
        """Send each request that an exchange yields, and return its result."""
        try:
            request = next(exchange)
            while True:
                request = exchange.send(await self._post(request.path, request.body))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def run_all(self, exchanges: Iterable[Exchange[T]]) -> list[T]:
        """Run exchanges, at most `concurrency` at a time; the results are in the order of the exchanges."""
        semaphore = asyncio.Semaphore(self.concurrency)

        async def run_one(exchange: Exchange[T]) -> T:
            async with semaphore:
                return await self.run(exchange)

        return list(await asyncio.gather(*(run_one(exchange) for exchange in exchanges)))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineFailed(
                f"the engine did not answer POST {path}: {error or type(error).__name__}",
                hint="read the engine's log",
                failure="no_answer",
            ) from None
        if response.status_code != 200:
            raise EngineFailed(
                f"the engine answered POST {path} with HTTP {response.status_code}: {response.text[:300]}",
                hint="if the prompt exceeds the context, increase the deployment's context length",
                failure="no_answer",
            )
        return dict(response.json())
