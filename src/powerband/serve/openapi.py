"""What the fleet answers, as an OpenAPI document: as far as the picker itself reads a request, and no further."""

from __future__ import annotations

from typing import Any

_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}},
}
_COMMON = {
    "model": {"type": "string", "minLength": 1},
    "max_tokens": {"type": ["integer", "null"], "minimum": 0},
    "max_completion_tokens": {"type": ["integer", "null"], "minimum": 0},
    "stream": {"type": "boolean"},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {name: {"type": "string"} for name in ("message", "type", "code")},
        }
    },
}
_REFUSALS = {
    "400": "the body is not what was expected",
    "401": "no such key",
    "403": "the tenant may not ask for this model",
    "404": "there is no such model",
    "405": "another method is expected",
    "408": "the request came too slowly",
    "413": "the body is larger than 8 MiB",
    "429": "it cannot be answered in time, or the tenant asked too much; Retry-After says when to come back",
}


def document(*, version: str) -> dict[str, Any]:
    """Return it."""
    asked = {"parameters": [_header("x-powerband-priority", "high, normal or low"), _PATIENCE]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Powerband fleet", "version": version},
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/chat/completions": {"post": asked | _writes("messages", {"type": "array", "items": _MESSAGE})},
            "/v1/completions": {"post": asked | _writes("prompt", {"type": ["string", "array"]})},
            "/v1/models": {"get": {"responses": {"200": _json("the models"), "401": _refusal("401")}}},
            "/health": {"get": {"responses": {"200": _json("all is well"), "503": _text("not every model answers")}}},
            "/metrics": {"get": {"responses": {"200": _text("in Prometheus' format")}}},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _writes(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"type": "object", "required": ["model", name], "properties": {**_COMMON, name: {**schema, "minItems": 1}}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "as the engine answers", "content": answer},
            **{status: _refusal(status) for status in _REFUSALS},
        },
    }


def _refusal(status: str) -> dict[str, Any]:
    found = _json(_REFUSALS[status])
    found["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/Error"}
    return found


def _json(said: str) -> dict[str, Any]:
    return {"description": said, "content": {"application/json": {"schema": {"type": "object"}}}}


def _text(said: str) -> dict[str, Any]:
    return {"description": said, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _header(name: str, said: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": said, "schema": {"type": "string"}}


_PATIENCE = _header("x-powerband-patience-s", "how long it may wait for its first token, in seconds")
