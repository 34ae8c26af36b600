"""The endpoint picker protocol of the Gateway API Inference Extension: one ext_proc stream for each request.

Gateways stream bodies in both directions (FULL_DUPLEX_STREAMED): each chunk that they send waits for the picker to send
it back. The request's chunks go back after the decision, the answer's at once. The end of the stream is the end of the
request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf import struct_pb2

from powerband.serve import envoy
from powerband.serve.router import ext_proc, requests
from powerband.serve.router.answer_usage import AnswerUsage
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.scheduler import RequestOutcome, RequestScheduler, RoutingDecision
from powerband.serve.router.telemetry import Telemetry

SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
NAMESPACE, SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
CONFORMANCE_SELECTION, CONFORMANCE_SERVED = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"

_MAX_BODY_BYTES = 64 * 2**20
_CHUNK_BYTES = 62 * 1024  # gateways reject messages with more than 64 KiB of a body


class EndpointPicker(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """The external processor of a gateway."""

    def __init__(self, scheduler: RequestScheduler, telemetry: Telemetry, *, conformance: bool = False) -> None:
        self.scheduler, self.telemetry, self.conformance = scheduler, telemetry, conformance
        self.open_streams = 0

    async def Process(self, _: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        """Handle one request: read it, choose its endpoint, send it on, and follow its answer to the end."""
        request_id, arrived_s = secrets.token_hex(8), time.monotonic()
        answer = _Answer(arrived_s)
        self.open_streams += 1
        try:
            if (message := await context.read()) is grpc.aio.EOF:
                return
            headers = ext_proc.headers_of(message.request_headers)
            if response := self._serve_locally(headers):
                await context.write(response)
                return
            body, has_body, trailers = await _read_body(context, message)
            decision = await self._decide(request_id, headers, body, _subset_of(message))
            body = body if decision.body is None else decision.body
            await context.write(_route_to(decision, hides_key=self.scheduler.admission.tenants is not None))
            if has_body:
                for chunk in _body_chunks(body, last=not trailers):
                    await context.write(chunk)
            if trailers:
                await context.write(wire.ProcessingResponse(request_trailers=wire.TrailersResponse()))
            while (message := await context.read()) is not grpc.aio.EOF:
                if message.HasField("response_headers"):
                    decision = self._served(request_id, message, decision)
                await context.write(answer.pass_on(message, decision, conformance=self.conformance))
        except RequestRejected as error:
            self.telemetry.count_rejection(error)
            await context.write(ext_proc.reject(error))
        finally:
            self.open_streams -= 1
            self.scheduler.finish(request_id, answer.outcome())

    async def _decide(
        self, request_id: str, headers: Mapping[str, str], body: bytes, subset: frozenset[str] | None
    ) -> RoutingDecision:
        """Queue a completion and choose its endpoint; other requests go to the least busy endpoint."""
        path = headers.get(":path", "").partition("?")[0]
        if self.conformance and (wanted := headers.get(CONFORMANCE_SELECTION)):
            return self._chosen_by_test(wanted, subset)
        tenant = self.scheduler.admission.authenticate(headers.get("authorization", ""))
        if path not in requests.PATHS:
            return self.scheduler.any_endpoint(subset)
        ext_proc.expect_completion(path, headers)
        return await self.scheduler.pick(body, request_id=request_id, tenant=tenant, headers=headers, subset=subset)

    def _chosen_by_test(self, wanted: str, subset: frozenset[str] | None) -> RoutingDecision:
        """Return the ready endpoints that a conformance test names by IP or address, in its order."""
        names = [one.strip() for one in wanted.split(",")]
        ready = [one for pool in self.scheduler.pools.values() for one in pool.endpoints.values() if one.ready]
        known = [
            one.address for name in names for one in ready if name in (one.address, one.address.rpartition(":")[0])
        ]
        allowed = [one for one in known if subset is None or one in subset]
        if not allowed:
            return self.scheduler.any_endpoint(subset)
        return RoutingDecision(tuple(dict.fromkeys(allowed)), replica="", recipe="", body=None)

    def _serve_locally(self, headers: Mapping[str, str]) -> Any:
        """Answer the list of models, which one engine cannot know; None for all others."""
        if headers.get(":path", "").partition("?")[0] != "/v1/models" or headers.get(":method") != "GET":
            return None
        try:
            tenant = self.scheduler.admission.authenticate(headers.get("authorization", ""))
        except RequestRejected as error:
            self.telemetry.count_rejection(error)
            return ext_proc.reject(error)
        return ext_proc.models(self.scheduler.model_names(tenant))

    def _served(self, request_id: str, message: Any, decision: RoutingDecision) -> RoutingDecision:
        """Account for a request at the endpoint that answers it; return the decision with that endpoint."""
        served = message.metadata_context.filter_metadata[NAMESPACE].fields[SERVED].string_value
        if not served or not (endpoint := self.scheduler.served_by(request_id, served)):
            return decision
        return replace(decision, replica=endpoint.name, recipe=endpoint.recipe)


class _Answer:
    """Passes one answer on to the client, and measures it."""

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self._usage = AnswerUsage()
        self._status = 0
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._complete = False

    def pass_on(self, message: Any, decision: RoutingDecision, *, conformance: bool) -> Any:
        """Return the reply to one message about the answer."""
        if message.HasField("response_body"):
            part = message.response_body
            if part.body:
                self._last_s = time.monotonic() - self._arrived_s
                self._first_s = self._first_s or self._last_s
                self._usage.add(part.body)
            self._complete |= part.end_of_stream
            return _body_reply("response_body", part.body, last=part.end_of_stream)
        if message.HasField("response_headers"):
            return self._pass_headers(message, decision, conformance=conformance)
        self._complete = True
        return wire.ProcessingResponse(response_trailers=wire.TrailersResponse())

    def _pass_headers(self, message: Any, decision: RoutingDecision, *, conformance: bool) -> Any:
        status = ext_proc.headers_of(message.response_headers).get(":status", "")
        self._status = int(status) if status.isdigit() else 0
        self._complete |= message.response_headers.end_of_stream
        added = {envoy.RECIPE: decision.recipe, envoy.REPLICA: decision.replica}
        if conformance:
            served = message.metadata_context.filter_metadata[NAMESPACE].fields[SERVED].string_value
            added[CONFORMANCE_SERVED] = served or "missing: the gateway did not tell the endpoint"
        response = wire.ProcessingResponse(response_headers=wire.HeadersResponse())
        mutation = response.response_headers.response.header_mutation
        mutation.set_headers.extend(ext_proc.header(key, value) for key, value in added.items() if value)
        return response

    def outcome(self) -> RequestOutcome:
        """Return what became of the request."""
        return RequestOutcome(
            status=self._status,
            output_tokens=self._usage.output_tokens,
            prompt_tokens=self._usage.prompt_tokens,
            ttft_s=self._first_s,
            last_token_s=self._last_s,
            e2e_s=time.monotonic() - self._arrived_s,
            broken=not self._complete or self._usage.failed,
        )


async def _read_body(context: Any, first: Any) -> tuple[bytes, bool, bool]:
    """Return the body of a request, whether it has one, and whether trailers follow it."""
    if first.request_headers.end_of_stream:
        return b"", False, False
    chunks: list[bytes] = []
    size = 0
    while (message := await context.read()) is not grpc.aio.EOF:
        if message.HasField("request_trailers"):
            return b"".join(chunks), True, True
        part = message.request_body
        chunks.append(part.body)
        size += len(part.body)
        if size > _MAX_BODY_BYTES:
            limit = f"the request body is longer than {_MAX_BODY_BYTES // 2**20} MiB"
            raise RequestRejected(413, limit, code="body_too_long")
        if part.end_of_stream:
            return b"".join(chunks), True, False
    raise RequestRejected(
        400, "the request ended before its body", code="invalid_json"
    )  # nobody reads this: it is gone


def _subset_of(message: Any) -> frozenset[str] | None:
    """Return the addresses that the gateway allows, or None if it allows all.

    The hint is a list, or one string with commas. What is neither allows nothing: a wrong endpoint is worse than none.
    """
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    hint = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    named = [one.string_value for one in hint.list_value.values] or [hint.string_value]
    return frozenset(one.strip() for text in named for one in text.split(",") if one.strip())


def _route_to(decision: RoutingDecision, *, hides_key: bool) -> Any:
    """Name the endpoints in a header and in the metadata: gateways read one of them.

    `hides_key`: the API key is one of ours, which no engine needs to see.
    """
    destination = ",".join(decision.addresses)
    response = wire.ProcessingResponse(request_headers=wire.HeadersResponse())
    response.request_headers.response.clear_route_cache = True
    mutation = response.request_headers.response.header_mutation
    mutation.set_headers.append(ext_proc.header(envoy.DESTINATION, destination))
    if hides_key:
        mutation.remove_headers.append("authorization")
    lb = struct_pb2.Struct(fields={envoy.DESTINATION: struct_pb2.Value(string_value=destination)})
    response.dynamic_metadata.fields[NAMESPACE].struct_value.CopyFrom(lb)
    return response


def _body_chunks(body: bytes, *, last: bool) -> Iterator[Any]:
    """Yield a body in chunks; `last` marks the end of the stream with the last one."""
    for start in range(0, max(len(body), 1), _CHUNK_BYTES):
        at_end = start + _CHUNK_BYTES >= len(body)
        yield _body_reply("request_body", body[start : start + _CHUNK_BYTES], last=at_end and last)


def _body_reply(kind: str, body: bytes, *, last: bool) -> Any:
    streamed = wire.StreamedBodyResponse(body=body, end_of_stream=last)
    common = wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=streamed))
    return wire.ProcessingResponse(**{kind: wire.BodyResponse(response=common)})
