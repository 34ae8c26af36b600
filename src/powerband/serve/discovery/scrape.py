"""Read the model servers' own metrics: requests in their queue and running, KV cache, and whether they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx

from powerband import engines
from powerband.core.engine import Gauges

_TIMEOUT_S = 2.0
_PROBE_INTERVAL_S = 1.0  # where no source tells which endpoint is ready
_FAILURES = 2  # failed probes in a row after which an endpoint is not ready
_CONCURRENT = 16


@dataclass
class Reading:
    """The last answers of one endpoint."""

    gauges: Gauges = field(default_factory=Gauges)
    failures: int = _FAILURES  # until it has answered once

    @property
    def answers(self) -> bool:
        """Tell whether the endpoint answers probes."""
        return self.failures < _FAILURES

    @property
    def requests(self) -> int | None:
        """Return how many requests the engine has, running and queued; None if it does not tell."""
        if self.gauges.running is None:
            return None
        return round(self.gauges.running + (self.gauges.queue_depth or 0.0))


class Scraper:
    """Reads the metrics of all endpoints, every `interval_s`; the work is spread over the interval."""

    def __init__(self, interval_s: float, on_reading: Callable[[str], None]) -> None:
        self.interval_s, self.readings = interval_s, dict[str, Reading]()
        self._engines: Mapping[str, str] = {}  # engine by address
        self._probed: set[str] = set()
        self._on_reading = on_reading

    def update(self, by_address: Mapping[str, str], *, probed: set[str]) -> None:
        """Replace the endpoints: the engine of each address, and the addresses whose readiness only probes tell."""
        self._engines, self._probed = by_address, probed
        for gone in self.readings.keys() - by_address.keys():
            del self.readings[gone]
        for new in by_address.keys() - self.readings.keys():
            self.readings[new] = Reading()

    async def run(self) -> None:
        """Scrape and probe until cancelled."""
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as http, asyncio.TaskGroup() as group:
            group.create_task(self._probe_loop(http))
            while True:
                addresses = list(self._engines)
                for address in addresses:
                    group.create_task(self._scrape(http, address))
                    await asyncio.sleep(self.interval_s / len(addresses))
                if not addresses:
                    await asyncio.sleep(min(self.interval_s, 0.2))

    async def _scrape(self, http: httpx.AsyncClient, address: str) -> None:
        if (name := self._engines.get(address)) is None:
            return
        engine = engines.get(name)
        pages = {}
        for path in engine.gauge_pages:
            try:
                answer = await http.get(f"http://{address}{path}")
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                pages[path] = answer.text
        if reading := self.readings.get(address):
            reading.gauges = engine.gauges(pages)
            self._on_reading(address)

    async def _probe_loop(self, http: httpx.AsyncClient) -> None:
        limit = asyncio.Semaphore(_CONCURRENT)
        while True:
            await asyncio.gather(*(self._probe(http, address, limit) for address in sorted(self._probed)))
            unknown = any(not self.readings[one].answers for one in self._probed if one in self.readings)
            await asyncio.sleep(_PROBE_INTERVAL_S / 4 if unknown else _PROBE_INTERVAL_S)

    async def _probe(self, http: httpx.AsyncClient, address: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                answers = (await http.get(f"http://{address}/health")).status_code == 200
            except httpx.HTTPError:
                answers = False
        if reading := self.readings.get(address):
            before = reading.answers
            reading.failures = 0 if answers else reading.failures + 1
            if reading.answers != before:
                self._on_reading(address)
