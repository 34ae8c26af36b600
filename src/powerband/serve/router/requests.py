"""Read a request as far as the picker needs it; whatever is wrong with it becomes an answer in OpenAI's shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from powerband.core.prefix_hash import said

PATHS = ("/v1/chat/completions", "/v1/completions")


class Refused(Exception):
    """An answer that the picker gives itself."""

    def __init__(self, status: int, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after_s = status, message, code, retry_after_s

    @property
    def body(self) -> bytes:
        """Return the answer's body."""
        kind = (
            "invalid_request_error" if self.status < 429 else "rate_limit_error" if self.status == 429 else "api_error"
        )
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


Messages = tuple[tuple[str, str], ...]  # who said what


@dataclass(frozen=True, slots=True)
class Request:
    """What a body asks for."""

    model: str
    messages: Messages
    text: str
    most_tokens: int | None
    turns: int


def read(body: bytes) -> Request:
    """Return what a body asks for, or refuse it."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Refused(400, "the body is not a JSON object", code="invalid_json")
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise Refused(400, "'model' is missing", code="model_missing")
    most = data.get("max_completion_tokens", data.get("max_tokens"))
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise Refused(400, "'max_tokens' is not a whole number", code="invalid_max_tokens")
    if "messages" in data:
        messages = _chat(data["messages"])
        text = "".join(said(*one) for one in messages)
    else:
        text = _prompt(data.get("prompt"))
        messages = (("user", text),)
    turns = sum(role == "user" for role, _ in messages) or 1
    return Request(model=model, messages=messages, text=text, most_tokens=most, turns=turns)


def _chat(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "'messages' is not a list of messages", code="invalid_messages")
    parts = []
    for one in messages:
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise Refused(400, "a message is an object with a role", code="invalid_messages")
        content = one.get("content")
        if isinstance(content, list):  # of parts; what is no text does not count
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append((one["role"], content if isinstance(content, str) else ""))
    return tuple(parts)


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:  # texts, or numbers of tokens
        return " ".join(map(str, prompt))
    raise Refused(400, "'prompt' or 'messages' is missing", code="prompt_missing")
