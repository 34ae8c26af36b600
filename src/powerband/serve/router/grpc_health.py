"""The service grpc.health.v1.Health: liveness, readiness, and the state of the endpoint picker.

Its messages have one field each, as protobuf's own wrappers have: no generated code is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

LIVENESS, READINESS, PICKER = "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_WATCH_S = 0.1


class HealthService:
    """Answers health checks; `ready` tells whether gateways should send requests here."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def add_to(self, server: Any) -> None:
        """Register the service at a server."""
        codec: dict[str, Any] = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": UInt32Value.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **codec),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods),))

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return _SERVING
        if service in ("", READINESS, PICKER):
            return _SERVING if self._ready() else _NOT_SERVING
        return _SERVICE_UNKNOWN

    async def _check(self, request: Any, context: Any) -> Any:
        if (status := self._status(request.value)) == _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service '{request.value}'")
        return UInt32Value(value=status)

    async def _watch(self, request: Any, _: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            if (status := self._status(request.value)) != last:
                last = status
                yield UInt32Value(value=status)
            await asyncio.sleep(_WATCH_S)
