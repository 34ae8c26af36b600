"""Messages of Envoy's external processing protocol, as both ways to run the picker read and write them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.type.v3 import http_status_pb2

from powerband.serve.router import requests
from powerband.serve.router.requests import RequestRejected

_NO_BODY = ":no-body"  # no header of a client has this name
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(message: Any) -> dict[str, str]:
    """Return the headers of a request or a response; a request without a body fails `expect_completion`."""
    found = {one.key: one.raw_value.decode("latin-1") or one.value for one in message.headers.headers}
    return found | {_NO_BODY: "true"} if message.end_of_stream else found


def expect_completion(path: str, headers: Mapping[str, str]) -> None:
    """Raise RequestRejected unless the request is a POST with a body to one of the served paths."""
    if path not in requests.PATHS:
        raise RequestRejected(404, f"there is no path {path}", code="path_not_found")
    if headers.get(":method") != "POST":
        raise RequestRejected(405, f"{path} accepts only POST", code="method_not_allowed")
    if _NO_BODY in headers:
        raise RequestRejected(400, "the request has no body", code="invalid_json")


def header(key: str, value: str) -> Any:
    """Return a header that replaces those of the same name."""
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value.encode()), append_action=_OVERWRITE
    )


def respond(
    status: int, body: bytes, *, content_type: str = "application/json", retry_after_s: float | None = None
) -> Any:
    """Return a response to the client; the request goes to no replica."""
    headers = [header("content-type", content_type)]
    if retry_after_s is not None:
        headers.append(header("retry-after", str(max(1, math.ceil(retry_after_s)))))
    return wire.ProcessingResponse(
        immediate_response=wire.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=status),
            headers=wire.HeaderMutation(set_headers=headers),
            body=body,
        )
    )


def reject(error: RequestRejected) -> Any:
    """Return the response to a rejected request."""
    return respond(error.status, error.body, retry_after_s=error.retry_after_s)


def models(names: Iterable[str]) -> Any:
    """Return the response to a request for the list of models."""
    data = [{"id": name, "object": "model", "owned_by": "powerband"} for name in names]
    return respond(200, json.dumps({"object": "list", "data": data}).encode())
