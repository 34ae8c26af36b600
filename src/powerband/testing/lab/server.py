"""An OpenAI server over a simulated batch: the HTTP interface, errors and metrics of vLLM or of llama.cpp's server.

A token is a piece of at most four letters with the space before it; its id is a checksum, so that equal texts have
equal tokens. An answer has exactly as many tokens as the request allows.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from powerband.testing.lab.batching import Batching, Request, SlotCache, Step

Flavour = Literal["vllm", "llamacpp"]
PIECE = r"\s?[^\s]{1,4}|\s"  # of a text, that is one token
_VOCABULARY = 1 << 17
_WORDS = (" the", " load", " was", " high", " and", " then", " it", " fell")  # one token each
_DEFAULT_TOKENS = 16  # of an answer without max_tokens
_CATCH_UP_S = 0.1  # by which a late server shortens its next waits
_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


async def serve(
    batching: Batching,
    *,
    host: str,
    port: int,
    model: str,
    flavour: Flavour,
    context_tokens: int,
    time_scale: float,
    on_ready: Callable[[], None],
    hidden_metrics: Collection[str] = (),
) -> None:
    """Serve until cancelled; all durations are multiplied by `time_scale`."""
    if not batching.cache.holds(context_tokens):
        raise ValueError(f"the KV cache does not hold one request of {context_tokens} tokens")
    engine = _Engine(batching, model=model, flavour=flavour, context_tokens=context_tokens, time_scale=time_scale)
    engine.hidden_metrics = hidden_metrics
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), host, port, backlog=4096)
    try:
        on_ready()
        await engine.run()
    finally:
        server.close()
        for connection in list(engine.connections):
            connection.transport.abort()


def tokenize(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [zlib.crc32(piece.encode()) % _VOCABULARY for piece in re.findall(PIECE, text)]


def render(messages: list[dict[str, Any]]) -> str:
    """Return a chat as text, up to the start of the next answer."""
    turns = "".join(f"<|im_start|>{one.get('role', '')}\n{_content(one)}<|im_end|>\n" for one in messages)
    return turns + "<|im_start|>assistant\n"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


_WORD_IDS = tuple(tokenize("".join(_WORDS)))
assert len(_WORD_IDS) == len(_WORDS)


@dataclass(slots=True, eq=False)
class _Answer:
    """What a client waits for."""

    connection: _Connection
    chat: bool
    streamed: bool
    with_usage: bool
    before: bytes  # of a streamed token, then the token, then `after`
    after: bytes
    arrived_s: float
    admitted_s: float = 0.0
    first_s: float = 0.0


class _Engine:
    """Runs the steps and gives their tokens to the connections."""

    def __init__(
        self, batching: Batching, *, model: str, flavour: Flavour, context_tokens: int, time_scale: float
    ) -> None:
        self.batching, self.model, self.flavour = batching, model, flavour
        self.context_tokens, self.time_scale = context_tokens, time_scale
        self.connections: set[_Connection] = set()
        self.answers: dict[Request, _Answer] = {}
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.ended_tokens = 0
        self.prefill_s = self.decode_s = 0.0
        self.hidden_metrics: Collection[str] = ()
        self._wake = asyncio.Event()
        self._registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self._histograms = {
            short: Histogram(name, short, list(self._labels), buckets=_BUCKETS_S, registry=self._registry).labels(
                **self._labels
            )
            for short, name in _HISTOGRAMS.items()
        }

    async def run(self) -> None:
        """Run one step after another, on an absolute schedule."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            begun_s = max(due_s, loop.time() - _CATCH_UP_S)
            step = self.batching.step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
                continue
            for request in step.admitted:
                if not self.answers[request].admitted_s:
                    self.answers[request].admitted_s = begun_s
            due_s = begun_s + step.duration_s * self.time_scale
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._deliver(step, loop.time())

    def submit(self, request: Request, answer: _Answer) -> None:
        """Queue a request after the fixed part of its latency."""
        self.answers[request] = answer
        delay_s = self.batching.times.request_s * self.time_scale
        asyncio.get_running_loop().call_later(delay_s, self._enqueue, request)

    def abort(self, request: Request) -> None:
        """Forget a request whose client is gone."""
        if self.answers.pop(request, None):
            self.batching.abort(request)

    def _enqueue(self, request: Request) -> None:
        if request in self.answers:
            self.batching.add(request)
            self._wake.set()

    def _deliver(self, step: Step, now_s: float) -> None:
        self.output_tokens += len(step.tokens)
        ended = set(step.finished)
        for request in step.tokens:
            answer = self.answers.get(request)
            if answer is None:
                continue
            if request.generated == 1:
                answer.first_s = now_s
                self.prompt_tokens += len(request.prompt)
                self.cached_tokens += request.cached or 0
                self.prefill_s += now_s - answer.admitted_s
                self._histograms["ttft"].observe(now_s - answer.arrived_s)
            if request in ended:
                del self.answers[request]
                self._count(request, answer, now_s)
                answer.connection.end(request, answer)
            elif answer.streamed:
                answer.connection.token(request, answer)

    def _count(self, request: Request, answer: _Answer, now_s: float) -> None:
        self.ended_tokens += request.generated
        self.decode_s += now_s - answer.first_s
        self._histograms["e2e"].observe(now_s - answer.arrived_s)
        self._histograms["queue"].observe(answer.admitted_s - answer.arrived_s)
        if request.generated > 1:
            self._histograms["tpot"].observe((now_s - answer.first_s) / (request.generated - 1))

    def exposition(self) -> str:
        """Return the metrics in Prometheus' text format."""
        batching, running, waiting = self.batching, len(self.batching.running), len(self.batching.waiting)
        if self.flavour == "llamacpp":
            return _lines(
                {
                    "llamacpp:prompt_tokens_total": self.prompt_tokens - self.cached_tokens,
                    "llamacpp:prompt_tokens_cached_total": self.cached_tokens,
                    "llamacpp:prompt_seconds_total": self.prefill_s,
                    "llamacpp:tokens_predicted_total": self.ended_tokens,
                    "llamacpp:tokens_predicted_seconds_total": self.decode_s,
                    "llamacpp:requests_processing": running,
                    "llamacpp:requests_deferred": waiting,
                    "llamacpp:spec_decode_num_draft_tokens_total": 0,
                    "llamacpp:spec_decode_num_accepted_tokens_total": 0,
                }
            )
        values = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": waiting,
            "vllm:kv_cache_usage_perc": batching.cache.usage,
            "vllm:prefix_cache_queries_total": batching.prefix_queries_tokens,
            "vllm:prefix_cache_hits_total": batching.prefix_hits_tokens,
            "vllm:num_preemptions_total": batching.preemptions,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.output_tokens,
            "vllm:admission_rejections_total": 0,
        }
        labels = ",".join(f'{name}="{value}"' for name, value in self._labels.items())
        return _lines(values, f"{{{labels}}}") + generate_latest(self._registry).decode()

    def refusal(self, prompt_tokens: int, asked_tokens: int) -> dict[str, Any] | None:
        """Return the engine's error for a request that does not fit; None: it fits."""
        limit = self.context_tokens
        if self.flavour == "llamacpp":
            if prompt_tokens < limit:
                return None
            message = (
                f"request ({prompt_tokens} tokens) exceeds the available context size ({limit} tokens), "
                "try increasing it"
            )
            kind = {"type": "exceed_context_size_error", "n_prompt_tokens": prompt_tokens, "n_ctx": limit}
            return {"code": 400, "message": message, **kind}
        kind = {"type": "BadRequestError", "code": 400}
        if asked_tokens > limit:
            message = (
                f"max_tokens={asked_tokens} cannot be greater than max_model_len={limit}. "
                "Please request fewer output tokens."
            )
            return {"message": message, "param": "max_tokens", **kind}
        if prompt_tokens >= limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
                f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            return {"message": message, "param": "input_tokens", **kind}
        return None


class _Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after another."""

    transport: asyncio.Transport

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        self._buffer = bytearray()
        self._request: Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Abort the request that is being answered."""
        self.engine.connections.discard(self)
        if self._request:
            self.engine.abort(self._request)

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are complete."""
        self._buffer += data
        self._next()

    def _next(self) -> None:
        while self._request is None and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].decode("latin-1")
            match = re.search(r"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            last = end + 4 + (int(match[1]) if match else 0)
            if len(self._buffer) < last:
                return
            body = bytes(self._buffer[end + 4 : last])
            del self._buffer[:last]
            try:
                method, target, _ = head.split(" ", 2)
                self._route(method, target.partition("?")[0], json.loads(body) if body else {})
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                self._send(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})

    def _route(self, method: str, path: str, body: dict[str, Any]) -> None:
        engine, llamacpp = self.engine, self.engine.flavour == "llamacpp"
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self._generate(body, chat=path.endswith("chat/completions"))
        elif method == "POST" and path == "/tokenize":
            ids = tokenize(str(body.get("content", ""))) if llamacpp else _prompt(body)
            more = {} if llamacpp else {"count": len(ids), "max_model_len": engine.context_tokens}
            self._send(200, {"tokens": ids, **more})
        elif path == "/health":
            self._send(200, {"status": "ok"})
        elif path == "/metrics":
            lines = engine.exposition().splitlines(keepends=True)
            self._send(200, "".join(one for one in lines if not any(name in one for name in engine.hidden_metrics)))
        elif path == "/v1/models":
            facts = {"owned_by": engine.flavour, "max_model_len": engine.context_tokens}
            self._send(200, {"object": "list", "data": [{"id": engine.model, "object": "model", **facts}]})
        elif llamacpp and method == "POST" and path == "/apply-template":
            self._send(200, {"prompt": render(body["messages"])})
        elif isinstance(engine.batching.cache, SlotCache) and path == "/slots":
            self._send(200, _slots(engine.batching.cache))
        elif isinstance(engine.batching.cache, SlotCache) and path == "/props":
            slots = len(engine.batching.cache.slots)
            settings = {"n_ctx": engine.context_tokens}
            self._send(200, {"default_generation_settings": settings, "total_slots": slots, "model_path": engine.model})
        else:
            self._send(404, {"error": {"message": f"no such path {path}", "type": "NotFoundError", "code": 404}})

    def _generate(self, body: dict[str, Any], *, chat: bool) -> None:
        engine, ids = self.engine, _prompt(body)
        asked = int(body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS)
        if error := engine.refusal(len(ids), asked):
            self._send(400, {"error": error})
            return
        count = min(asked, engine.context_tokens - len(ids))
        self._request = Request(ids, [_WORD_IDS[number % len(_WORDS)] for number in range(count)])
        streamed = bool(body.get("stream"))
        before, after = _event(engine.model, chat=chat)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        now_s = asyncio.get_running_loop().time()
        engine.submit(self._request, _Answer(self, chat, streamed, with_usage, before, after, now_s))
        if streamed:
            kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            self.transport.write(b"HTTP/1.1 200 OK\r\n" + self._name() + kind + b"\r\n")

    def token(self, request: Request, answer: _Answer) -> None:
        """Send one token that is not the last."""
        data = answer.before + _word(request.generated - 1) + answer.after
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, request: Request, answer: _Answer) -> None:
        """Send the last token of a stream, or the whole answer, and go on with the next request."""
        tokens = {"prompt_tokens": len(request.prompt), "completion_tokens": request.generated}
        usage = {**tokens, "total_tokens": request.known, "prompt_tokens_details": {"cached_tokens": request.cached}}
        if answer.streamed:
            last = answer.after.replace(b'"finish_reason": null', b'"finish_reason": "length"')
            data = answer.before + _word(request.generated - 1) + last
            if answer.with_usage:
                value = {"object": "usage", "model": self.engine.model, "choices": [], "usage": usage}
                data += b"data: %b\n\n" % json.dumps(value).encode()
            data += b"data: [DONE]\n\n"
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            text = b"".join(_word(number) for number in range(request.generated)).decode()
            content = {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
            choice = {"index": 0, "finish_reason": "length", **content}
            self._send(200, {"object": "answer", "model": self.engine.model, "choices": [choice], "usage": usage})
        self._request = None
        self._next()

    def _name(self) -> bytes:
        return b"server: llama.cpp\r\n" if self.engine.flavour == "llamacpp" else b"server: uvicorn\r\n"

    def _send(self, status: int, value: Any) -> None:
        kind = b"text/plain; version=0.0.4" if isinstance(value, str) else b"application/json"
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        head = b"HTTP/1.1 %d X\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, self._name(), kind, len(data)) + data)


def _prompt(body: dict[str, Any]) -> list[int]:
    """Return the tokens of a request's prompt, which is a text, a list of tokens, or a chat."""
    prompt = render(body["messages"]) if "messages" in body else body.get("prompt", "")
    return list(map(int, prompt)) if isinstance(prompt, list) else tokenize(str(prompt)) or [0]


def _event(model: str, *, chat: bool) -> tuple[bytes, bytes]:
    """Return a streamed token's event, up to the token and after it."""
    content = {"delta": {"content": "\0"}} if chat else {"text": "\0"}
    choice = {"index": 0, **content, "finish_reason": None}
    kind = "chat.completion.chunk" if chat else "text_completion"
    value = {"id": "lab", "object": kind, "created": int(time.time()), "model": model, "choices": [choice]}
    before, _, after = json.dumps(value).encode().partition(b"\\u0000")
    return b"data: " + before, after + b"\n\n"


def _word(number: int) -> bytes:
    return _WORDS[number % len(_WORDS)].encode()


def _slots(cache: SlotCache) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "n_ctx": cache.context_per_slot,
            "is_processing": slot.request is not None,
            "n_prompt_tokens": slot.request.computed if slot.request else len(slot.tokens),
        }
        for number, slot in enumerate(cache.slots)
    ]


def _lines(values: dict[str, float], labels: str = "") -> str:
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in values}
    return "".join(f"# TYPE {name} {kinds[name]}\n{name}{labels} {value}\n" for name, value in values.items())
