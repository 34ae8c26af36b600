"""Parse the fields of a request body that routing needs; errors become responses in OpenAI's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from powerband.core.prefix_hash import message_text

PATHS = ("/v1/chat/completions", "/v1/completions")


class RequestRejected(Exception):
    """The picker rejects the request with this status and message; no replica sees it."""

    def __init__(self, status: int, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after_s = status, message, code, retry_after_s

    @property
    def body(self) -> bytes:
        """Return the response body: an OpenAI error object."""
        kind = (
            "invalid_request_error" if self.status < 429 else "rate_limit_error" if self.status == 429 else "api_error"
        )
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


Messages = tuple[tuple[str, str], ...]  # role and content


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed fields of a request body."""

    model: str
    messages: Messages
    text: str  # the whole prompt
    max_tokens: int | None
    turns: int  # user messages


def read(body: bytes) -> Request:
    """Parse a body; raise RequestRejected if it is invalid."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestRejected(400, "the request body is not valid JSON", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestRejected(400, "the request body is not a JSON object", code="invalid_json")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise RequestRejected(400, "'model' must be a non-empty string", code="model_missing")
    max_tokens = data.get("max_completion_tokens", data.get("max_tokens"))
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0):
        raise RequestRejected(400, "'max_tokens' must be a non-negative integer", code="invalid_max_tokens")
    if "messages" in data:
        messages = _chat(data["messages"])
        text = "".join(message_text(*one) for one in messages)
    else:
        text = _prompt(data.get("prompt"))
        messages = (("user", text),)
    turns = sum(role == "user" for role, _ in messages) or 1
    return Request(model=model, messages=messages, text=text, max_tokens=max_tokens, turns=turns)


def _chat(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise RequestRejected(400, "'messages' must be a non-empty list", code="invalid_messages")
    found = []
    for one in messages:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise RequestRejected(400, "each message must be an object with a string 'role'", code="invalid_messages")
        content = one.get("content")
        if isinstance(content, list):  # content parts; only text parts count
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        found.append((one["role"], content if isinstance(content, str) else ""))
    return tuple(found)


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:  # strings or token ids
        return " ".join(map(str, prompt))
    raise RequestRejected(400, "'prompt' or 'messages' is missing", code="prompt_missing")
