"""A span for each request, and in it one for the wait, the reading and the writing, sent as OTLP's JSON.

The address is that of OpenTelemetry's own variable. Its SDK is not used: its messages and those of `xds-protos` cannot
be loaded into one process.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections import deque
from typing import Any

import httpx

from powerband.serve.router.scheduler import RequestContext, RequestOutcome

_ADDRESS = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SEND_S = 2.0
_MOST = 10_000  # spans that wait for a collector that is away
_PARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")  # of W3C's traceparent


def wanted() -> str:
    """Return where spans go; nothing where nobody asked for them."""
    return os.environ.get(_ADDRESS, "").rstrip("/")


class Tracer:
    """Spans on their way out."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MOST)

    def ended(self, case: RequestContext, ended: RequestOutcome) -> None:
        """Take a request that is over."""
        self._waiting.extend(spans(case, ended, now_s=time.time(), clock_s=time.monotonic()))

    async def send(self) -> None:
        """Send what there is, now and then; what cannot be delivered is dropped."""
        async with httpx.AsyncClient(trust_env=False, timeout=_SEND_S) as http:
            while True:
                await asyncio.sleep(_SEND_S)
                found, self._waiting = list(self._waiting), deque(maxlen=_MOST)
                if found:
                    try:
                        await http.post(f"{self.address}/v1/traces", json=exported(found))
                    except (httpx.HTTPError, httpx.InvalidURL):
                        continue


def spans(case: RequestContext, ended: RequestOutcome, *, now_s: float, clock_s: float) -> list[dict[str, Any]]:
    """Return the spans of a request, the outermost first."""
    ticket = case.ticket
    came_s = now_s - (clock_s - ticket.came_s)
    began_s = came_s + max(0.0, ticket.began_s - ticket.came_s)
    over_s = came_s + ended.total_s if ended.total_s else now_s
    parent = _PARENT.fullmatch(case.parent)
    trace = parent[1] if parent else secrets.token_hex(16)
    told = {
        "gen_ai.request.model": case.model.name,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "http.response.status_code": ended.status,
        "powerband.recipe": ticket.backend.recipe if ticket.backend else "",
        "powerband.replica": ticket.backend.name if ticket.backend else "",
    }
    whole = _span("request", trace, parent[2] if parent else "", came_s, over_s, told)
    whole["status"] = {"code": 2 if ended.status != 200 else 1}
    found = [whole, _span("queue", trace, whole["spanId"], came_s, began_s)]
    if ended.first_s is not None:
        first_s = came_s + ended.first_s
        last_s = came_s + (ended.last_s or ended.first_s)
        found.append(_span("prefill", trace, whole["spanId"], began_s, first_s))
        found.append(_span("decode", trace, whole["spanId"], first_s, last_s))
    return found


def _span(
    name: str, trace: str, parent: str, begin_s: float, end_s: float, told: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": secrets.token_hex(8),
        "parentSpanId": parent,
        "name": name,
        "kind": 2 if told else 1,  # a server's, or inside one
        "startTimeUnixNano": str(round(begin_s * 1e9)),
        "endTimeUnixNano": str(round(max(begin_s, end_s) * 1e9)),
        "attributes": [{"key": key, "value": _value(value)} for key, value in (told or {}).items()],
    }


def _value(value: Any) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


def exported(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return spans as a collector wants them."""
    service = [{"key": "service.name", "value": {"stringValue": "powerband"}}]
    scope = {"scope": {"name": "powerband.serve"}, "spans": found}
    return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [scope]}]}
