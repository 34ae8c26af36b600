"""The picker: a process that Envoy asks once for each request (ext_proc) and tells of its end (access log).

    python -m powerband.serve.router.picker FOLDER

The folder holds `order.json`; the supervisor speaks through `control.sock` in it, Envoy through `picker.sock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from envoy.type.v3 import http_status_pb2

from powerband import __version__
from powerband.core.fleet import Tenants
from powerband.errors import PowerbandError
from powerband.serve import envoy, openapi
from powerband.serve.router import requests, tracing
from powerband.serve.router.requests import Refused
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler, RoutingDecision
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.router.tracing import Tracer
from powerband.serve.spec import FleetSpec, ModelSpec
from powerband.store import documents

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_EXPIRE_S, _TELL_S = 0.02, 0.25


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """What Envoy speaks to."""

    def __init__(self, desk: RequestScheduler, watch: Telemetry) -> None:
        self.desk, self.watch = desk, watch

    async def Process(self, stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer for one request: go on, go there, or no."""
        headers: Mapping[str, str] = {}
        tenant, case, delivered = "", secrets.token_hex(8), True
        try:
            async for message in stream:
                if message.HasField("request_headers"):
                    headers = _headers(message.request_headers.headers)
                    path = headers.get(":path", "").partition("?")[0]
                    if answer := self._own(path, headers):
                        yield answer
                        return
                    tenant = self.desk.door.known(headers.get("authorization", ""))
                    _expect_post(path, headers, ended=message.request_headers.end_of_stream)
                    yield _go_on(case)
                elif message.HasField("request_body"):
                    body = message.request_body.body
                    sent, delivered = await self.desk.pick(body, case=case, tenant=tenant, headers=headers), False
                    yield _there(sent)
                    delivered = True
                    return
        except Refused as no:
            self.watch.refused(no)
            yield _immediately(no.status, no.body, retry_after_s=no.retry_after_s)
        finally:
            if not delivered:
                self.desk.end(case, RequestOutcome(status=0))

    def _own(self, path: str, headers: Mapping[str, str]) -> Any:
        """Answer what is asked of the fleet itself."""
        if path == "/health":
            if not self.desk.healthy():
                return _immediately(503, b"not every model has a replica that answers", kind="text/plain")
            return _immediately(200, b'{"status": "ok"}')
        if path == "/metrics":
            return _immediately(200, self.watch.exposition(self.desk), kind="text/plain; version=0.0.4")
        if path == "/openapi.json":
            return _immediately(200, json.dumps(openapi.document(version=__version__)).encode())
        if path == "/v1/models":
            tenant = self.desk.door.known(headers.get("authorization", ""))
            data = [{"id": name, "object": "model", "owned_by": "powerband"} for name in self.desk.models(tenant)]
            return _immediately(200, json.dumps({"object": "list", "data": data}).encode())
        return None

    async def StreamAccessLogs(self, stream: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """Hear of the end of every request; when Envoy itself ends, so do all that it carried."""
        try:
            async for message in stream:
                for entry in message.http_logs.log_entry:
                    if ticket := entry.request.request_headers.get(envoy.TICKET):
                        self.desk.end(ticket, _ended(entry))
        finally:
            self.desk.abandon()
        return als_pb2.StreamAccessLogsResponse()


def _headers(found: Any) -> dict[str, str]:
    return {one.key: one.raw_value.decode("latin-1") or one.value for one in found.headers}


def _expect_post(path: str, headers: Mapping[str, str], *, ended: bool) -> None:
    if path not in requests.PATHS:
        raise Refused(404, f"there is no path {path}", code="path_not_found")
    if headers.get(":method") != "POST":
        raise Refused(405, "use POST", code="method_not_allowed")
    if ended:
        raise Refused(400, "the body is missing", code="invalid_json")


def _header(key: str, value: str) -> Any:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value.encode()), append_action=_OVERWRITE
    )


def _go_on(case: str) -> Any:
    """Let the body come. The request has its ticket from now on, so that Envoy tells of its end however it ends."""
    mutation = wire.HeaderMutation(
        remove_headers=(*envoy.OURS, "authorization"), set_headers=[_header(envoy.TICKET, case)]
    )
    response = wire.CommonResponse(header_mutation=mutation)
    return wire.ProcessingResponse(request_headers=wire.HeadersResponse(response=response))


def _there(sent: RoutingDecision) -> Any:
    """Name the replica, and those to ask where it does not answer."""
    named = {
        envoy.DESTINATION: ",".join(sent.addresses),
        envoy.RECIPE: sent.recipe,
        envoy.REPLICA: sent.replica,
    }
    told = [_header(key, value) for key, value in named.items()]
    common = wire.CommonResponse(header_mutation=wire.HeaderMutation(set_headers=told))
    if sent.body is not None:
        common.body_mutation.body = sent.body
        common.header_mutation.set_headers.append(_header("content-length", str(len(sent.body))))
    return wire.ProcessingResponse(request_body=wire.BodyResponse(response=common))


def _immediately(
    status: int, body: bytes, *, kind: str = "application/json", retry_after_s: float | None = None
) -> Any:
    headers = [_header("content-type", kind)]
    if retry_after_s is not None:
        headers.append(_header("retry-after", str(max(1, math.ceil(retry_after_s)))))
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=status),
            headers=wire.HeaderMutation(set_headers=headers),
            body=body,
        )
    )


def _ended(entry: Any) -> RequestOutcome:
    """Read an entry of the access log."""
    common = entry.common_properties
    fields = (
        common.metadata.filter_metadata[envoy.MARKS].fields if envoy.MARKS in common.metadata.filter_metadata else {}
    )
    marks = {name: value.number_value for name, value in fields.items()}
    began_us = common.start_time.seconds * 1e6 + common.start_time.nanos / 1e3
    first, last = marks.get("first", 0.0), marks.get("last", 0.0)
    return RequestOutcome(
        status=entry.response.response_code.value,
        output_tokens=int(marks.get("output", 0) or marks.get("pieces", 0)),
        prompt_tokens=int(marks.get("prompt", 0)),
        first_s=(first - began_us) / 1e6 if first else None,
        last_s=(last - began_us) / 1e6 if last else None,
        total_s=_seconds(common.time_to_last_downstream_tx_byte),
    )


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


async def _control(
    desk: RequestScheduler, watch: Telemetry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Hear from the supervisor which replicas there are, and tell it how things are."""

    async def tell() -> None:
        while True:
            writer.write(json.dumps(watch.summary(desk)).encode() + b"\n")
            await writer.drain()
            await asyncio.sleep(_TELL_S)

    telling = asyncio.create_task(tell())
    try:
        while line := await reader.readline():
            told = json.loads(line)
            if "backends" in told:
                desk.serve({name: ModelSpec.of(part) for name, part in told["parts"].items()})
                desk.backends(told["backends"], told["shares"])
            if "replicas" in told:
                watch.told = told
            if "tenants" in told:
                with contextlib.suppress(PowerbandError):  # the supervisor says so; the old list stays
                    desk.door.admit(documents.of(Tenants, Path(told["tenants"])))
    finally:
        telling.cancel()
        writer.close()


async def _main(folder: Path) -> None:
    order = FleetSpec.read(folder)
    tenants = documents.of(Tenants, Path(order.tenants)) if order.tenants else None
    watch = Telemetry(folder / "traffic.jsonl" if order.capture else None)
    tracer = Tracer(address) if (address := tracing.wanted()) else None

    def on_end(case: RequestContext, ended: RequestOutcome) -> None:
        watch.ended(case, ended)
        if tracer:
            tracer.ended(case, ended)

    desk = RequestScheduler(order.parts, tenants, on_end=on_end, noting=order.capture, noting_text=order.capture_text)
    for name in ("picker.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 * 2**20)])
    picker = Picker(desk, watch)
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(picker, server)
    server.add_insecure_port(f"unix:{folder / 'picker.sock'}")
    await server.start()
    control = await asyncio.start_unix_server(
        lambda reader, writer: _control(desk, watch, reader, writer), folder / "control.sock"
    )
    async with control, asyncio.TaskGroup() as group:
        if tracer:
            group.create_task(tracer.send())
        while True:
            desk.expire()
            await asyncio.sleep(_EXPIRE_S)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
