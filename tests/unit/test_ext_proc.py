"""The messages of one request between a gateway and the endpoint picker, without a gateway."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("grpc")

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire

from powerband.serve.router import endpoint_protocol
from powerband.serve.router.endpoint_protocol import EndpointPicker
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.spec import ModelSpec

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'
ANSWER = b'data: {"choices": []}\n\ndata: {"usage": {"prompt_tokens": 4, "completion_tokens": 9}}\n\ndata: [DONE]\n\n'


class Gateway:
    """A gRPC context that sends these messages and keeps the replies."""

    def __init__(self, *messages: Any) -> None:
        self.messages, self.replies = list(messages), list[Any]()

    async def read(self) -> Any:
        return self.messages.pop(0) if self.messages else grpc.aio.EOF

    async def write(self, reply: Any) -> None:
        self.replies.append(reply)


def headers(kind: str = "request_headers", *, last: bool = False, **values: str) -> Any:
    rows = {":path": "/v1/chat/completions", ":method": "POST"} if kind == "request_headers" else {":status": "200"}
    rows |= {name.replace("_", ":", 1) if name.startswith("_") else name: value for name, value in values.items()}
    found = [base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in rows.items()]
    return wire.ProcessingRequest(
        **{kind: wire.HttpHeaders(headers=base_pb2.HeaderMap(headers=found), end_of_stream=last)}
    )


def body(data: bytes, *, last: bool, kind: str = "request_body") -> Any:
    return wire.ProcessingRequest(**{kind: wire.HttpBody(body=data, end_of_stream=last)})


def trailers(kind: str) -> Any:
    return wire.ProcessingRequest(**{kind: wire.HttpTrailers()})


async def run(*messages: Any) -> tuple[list[Any], list[RequestOutcome], RequestScheduler]:
    ended = list[RequestOutcome]()

    def on_end(_: RequestContext, outcome: RequestOutcome) -> None:
        ended.append(outcome)

    scheduler = RequestScheduler({"m": ModelSpec("m", {}, "m", 1, 4, queue_timeout_s=1.0)}, on_end=on_end)
    row = {"name": "r", "address": "h:1", "max_in_flight": 4, "ready": True, "recipe": "m", "canary": False}
    scheduler.update_endpoints({"m": [row]}, {})
    gateway = Gateway(*messages)
    await EndpointPicker(scheduler, Telemetry()).Process(iter(()), gateway)  # type: ignore[arg-type]
    assert scheduler.pools["m"].running == 0 and not scheduler.contexts, "the end of the stream frees the slot"
    return gateway.replies, ended, scheduler


async def test_a_body_goes_back_in_chunks_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_protocol, "_CHUNK_BYTES", 32)
    answer = [body(ANSWER[:40], last=False, kind="response_body"), body(ANSWER[40:], last=True, kind="response_body")]
    replies, ended, _ = await run(
        headers(), body(BODY[:30], last=False), body(BODY[30:], last=True), headers("response_headers"), *answer
    )
    kinds = [one.WhichOneof("response") for one in replies]
    chunks = [
        one.request_body.response.body_mutation.streamed_response for one in replies if one.HasField("request_body")
    ]
    assert kinds[0] == "request_headers" and kinds[-3:] == ["response_headers", "response_body", "response_body"]
    assert b"".join(one.body for one in chunks) == BODY and len(chunks) == 3
    assert [one.end_of_stream for one in chunks] == [False, False, True]
    assert b"".join(one.response_body.response.body_mutation.streamed_response.body for one in replies[-2:]) == ANSWER
    assert [(one.status, one.prompt_tokens, one.output_tokens, one.broken) for one in ended] == [(200, 4, 9, False)]


async def test_trailers_end_a_body() -> None:
    replies, ended, _ = await run(
        headers(),
        body(BODY, last=False),
        trailers("request_trailers"),
        headers("response_headers"),
        body(ANSWER, last=False, kind="response_body"),
        trailers("response_trailers"),
    )
    assert [one.WhichOneof("response") for one in replies] == [
        "request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers",
    ]  # fmt: skip
    assert not replies[1].request_body.response.body_mutation.streamed_response.end_of_stream
    assert [one.broken for one in ended] == [False]


async def test_an_answer_that_is_cut_is_broken_and_a_request_that_is_cut_is_nothing() -> None:
    cut = [headers("response_headers"), body(ANSWER[:30], last=False, kind="response_body")]
    _, ended, _ = await run(headers(), body(BODY, last=True), *cut)
    assert [one.broken for one in ended] == [True]
    _, ended, scheduler = await run(headers(), body(BODY[:30], last=False))
    assert not ended and scheduler.pools["m"].arrived == 0


async def test_a_body_that_is_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_protocol, "_MAX_BODY_BYTES", 50)
    replies, _, _ = await run(headers(), body(BODY, last=False), body(BODY, last=True))
    assert [one.immediate_response.status.code for one in replies] == [413]
