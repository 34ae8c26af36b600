"""The fleet's OpenAPI document. It describes only the request fields that the picker reads; engines accept more."""

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
_ERRORS = {
    "400": "the request body is invalid",
    "401": "the API key is missing or unknown",
    "403": "the tenant may not use this model, or not read the metrics",
    "404": "there is no such model or path",
    "405": "the path does not accept this method",
    "408": "the client sent the request too slowly",
    "413": "the request body is larger than 8 MiB",
    "422": "the request ended several engines, and is not tried again",
    "429": "no capacity before the deadline, or the tenant exceeded a limit; Retry-After tells when to retry",
}


def document(*, version: str) -> dict[str, Any]:
    """Return the OpenAPI document."""
    parameters = {"parameters": [_header("x-powerband-priority", "high, normal or low"), _QUEUE_TIMEOUT]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Powerband fleet", "version": version},
        "security": [{"key": []}, {}],
        "paths": {
            "/v1/chat/completions": {
                "post": parameters | _completion("messages", {"type": "array", "items": _MESSAGE})
            },
            "/v1/completions": {"post": parameters | _completion("prompt", {"type": ["string", "array"]})},
            "/v1/models": {
                "get": {"responses": {"200": _json("the models that the key may use"), "401": _error("401")}}
            },
            "/health": {
                "get": {
                    "responses": {
                        "200": _json("every model has a ready replica"),
                        "503": _text("a model has no ready replica"),
                    }
                }
            },
            "/metrics": {
                "get": {
                    "responses": {
                        "200": _text("metrics in Prometheus' text format"),
                        "401": _error("401"),
                        "403": _error("403"),
                    }
                }
            },
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _completion(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"type": "object", "required": ["model", name], "properties": {**_COMMON, name: {**schema, "minItems": 1}}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "the engine's response", "content": answer},
            **{status: _error(status) for status in _ERRORS},
        },
    }


def _error(status: str) -> dict[str, Any]:
    found = _json(_ERRORS[status])
    found["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/Error"}
    return found


def _json(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}


def _text(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _header(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_QUEUE_TIMEOUT = _header("x-powerband-patience-s", "maximum time in the queue, in seconds")
