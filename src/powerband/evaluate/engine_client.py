"""Hold talks with a running engine: many at once, each question after the answer before it."""

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
_PATIENCE_S = 300.0


class EngineClient:
    """One running engine, ready to be asked."""

    def __init__(self, replica: Replica, model: str, *, at_once: int) -> None:
        self.engine: Engine[Any] = replica.engine
        self.url, self.model, self.at_once = replica.url, model, at_once
        limits = httpx.Limits(max_keepalive_connections=at_once if replica.engine.keeps_connections else 0)
        self._http = httpx.AsyncClient(
            base_url=replica.url, headers=replica.request_headers, timeout=_PATIENCE_S, limits=limits
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def hold(self, talk: Exchange[T]) -> T:
        """Ask every question of a talk, and return what came of it."""
        try:
            ask = next(talk)
            while True:
                ask = talk.send(await self._post(ask.path, ask.body))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def hold_all(self, talks: Iterable[Exchange[T]]) -> list[T]:
        """Hold many, so many at once as the engine serves; the results are in order."""
        gate = asyncio.Semaphore(self.at_once)

        async def one(talk: Exchange[T]) -> T:
            async with gate:
                return await self.hold(talk)

        return list(await asyncio.gather(*(one(talk) for talk in talks)))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineFailed(
                f"{path} was not answered: {error or type(error).__name__}",
                hint="read the engine's log",
                failure="no_answer",
            ) from None
        if answer.status_code != 200:
            raise EngineFailed(
                f"{path} was refused (HTTP {answer.status_code}): {answer.text[:300]}",
                hint="does the deployment's context hold the probes? give it more",
                failure="no_answer",
            )
        return dict(answer.json())
