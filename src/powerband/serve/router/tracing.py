"""OpenTelemetry tracing: a span per request, with child spans for queue, prefill and decode, sent as OTLP JSON.

The collector is set with OTEL_EXPORTER_OTLP_ENDPOINT. The OpenTelemetry SDK is not used: its protobuf messages and
those of `xds-protos` cannot be loaded into one process.
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

_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_EXPORT_INTERVAL_S = 2.0
_MAX_PENDING_SPANS = 10_000  # the oldest spans are dropped beyond this
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def collector_url() -> str:
    """Return the URL of the collector; empty if tracing is off."""
    return os.environ.get(_ENDPOINT_VARIABLE, "").rstrip("/")


class Tracer:
    """Buffers spans and sends them to a collector."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pending: deque[dict[str, Any]] = deque(maxlen=_MAX_PENDING_SPANS)

    def record(self, context: RequestContext, outcome: RequestOutcome) -> None:
        """Add the spans of a finished request."""
        self._pending.extend(spans(context, outcome, now_s=time.time(), clock_s=time.monotonic()))

    async def send(self) -> None:
        """Send the pending spans periodically; drop those that cannot be delivered."""
        async with httpx.AsyncClient(trust_env=False, timeout=_EXPORT_INTERVAL_S) as http:
            while True:
                await asyncio.sleep(_EXPORT_INTERVAL_S)
                batch, self._pending = list(self._pending), deque(maxlen=_MAX_PENDING_SPANS)
                if batch:
                    try:
                        await http.post(f"{self.url}/v1/traces", json=exported(batch))
                    except (httpx.HTTPError, httpx.InvalidURL):
                        continue


def spans(context: RequestContext, outcome: RequestOutcome, *, now_s: float, clock_s: float) -> list[dict[str, Any]]:
    """Return the root span of a request and its children; `now_s` is wall time, `clock_s` the scheduler's clock."""
    queued = context.queued
    arrived_s = now_s - (clock_s - queued.arrived_s)
    started_s = arrived_s + max(0.0, queued.started_s - queued.arrived_s)
    end_s = arrived_s + outcome.e2e_s if outcome.e2e_s else now_s
    parent = _TRACEPARENT.fullmatch(context.traceparent)
    trace = parent[1] if parent else secrets.token_hex(16)
    attributes = {
        "gen_ai.request.model": context.model.name,
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "http.response.status_code": outcome.status,
        "powerband.recipe": queued.endpoint.recipe if queued.endpoint else "",
        "powerband.replica": queued.endpoint.name if queued.endpoint else "",
    }
    root = _span("request", trace, parent[2] if parent else "", arrived_s, end_s, attributes)
    root["status"] = {"code": 2 if outcome.status != 200 else 1}
    found = [root, _span("queue", trace, root["spanId"], arrived_s, started_s)]
    if outcome.ttft_s is not None:
        first_s = arrived_s + outcome.ttft_s
        last_s = arrived_s + (outcome.last_token_s or outcome.ttft_s)
        found.append(_span("prefill", trace, root["spanId"], started_s, first_s))
        found.append(_span("decode", trace, root["spanId"], first_s, last_s))
    return found


def _span(
    name: str, trace: str, parent: str, begin_s: float, end_s: float, attributes: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": secrets.token_hex(8),
        "parentSpanId": parent,
        "name": name,
        "kind": 2 if attributes else 1,  # SPAN_KIND_SERVER or SPAN_KIND_INTERNAL
        "startTimeUnixNano": str(round(begin_s * 1e9)),
        "endTimeUnixNano": str(round(max(begin_s, end_s) * 1e9)),
        "attributes": [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()],
    }


def _value(value: Any) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


def exported(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spans as an OTLP export request."""
    service = [{"key": "service.name", "value": {"stringValue": "powerband"}}]
    scope = {"scope": {"name": "powerband.serve"}, "spans": found}
    return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [scope]}]}
