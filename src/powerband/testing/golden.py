"""The golden server: an OpenAI server without a model, with exactly known latencies.

Token i of an answer is sent at `start + ttft + i * itl`, on an absolute schedule, where `start` is the time at which
the request got a slot. An answer has exactly `max_tokens` tokens, each a word with a space.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

DEADLY = "deadly"  # the word that ends a server with the fault dies_on_word
WORDS = ("the", "engine", "works", "best", "in", "its", "power", "band")


class Golden:
    """Answers requests on schedule, counts requests and tokens, and injects the configured fault."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.slots = asyncio.Semaphore(options.max_num_seqs)
        self.running = self.waiting = self.prompt_tokens = self.output_tokens = self.refused = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the client closes it."""
        try:
            while line := await reader.readline():
                method, path, _ = line.decode("latin-1").split(" ", 2)
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode("latin-1").partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.route(method, path.partition("?")[0], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            writer.close()

    async def route(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        model = self.options.model
        if path == "/health":
            never = self.options.fault == "never_ready"
            await _send(writer, 503 if never else 200, {"status": "loading" if never else "ok"})
        elif path == "/v1/models":
            await _send(writer, 200, {"object": "list", "data": [{"id": model, "object": "model"}]})
        elif path == "/metrics":
            await _send(writer, 200, self.exposition(), content_type="text/plain; version=0.0.4")
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            if self.options.fault == "dies_on_first_request":
                print("golden server: exiting because of fault dies_on_first_request", flush=True)
                os._exit(1)
            await self.generate(path, body, writer)
        else:
            await _send(writer, 404, {"error": {"message": f"no such path {path}"}})

    async def generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Wait for a slot, then send every token at its scheduled time."""
        bound = self.options.max_num_queued_reqs
        if bound is not None and self.running + self.waiting >= bound:
            self.refused += 1
            await _send(writer, 503, {"error": {"message": "the queue is full"}})
            return
        chat = path.endswith("chat/completions")
        text = " ".join(str(m.get("content", "")) for m in body.get("messages", ())) or str(body.get("prompt", ""))
        if self.options.fault == "dies_on_word" and DEADLY in text:
            print(f"golden server: exiting because of the word '{DEADLY}'", flush=True)
            os._exit(1)
        prompt, count = max(1, len(text.split())), int(body.get("max_tokens") or 16)
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            self.prompt_tokens += prompt
            due = time.monotonic() + self.options.ttft_s
            vocabulary = WORDS[::-1] if self.options.fault == "answers_wrongly" else WORDS
            words = [vocabulary[i % len(vocabulary)] + " " for i in range(count)]
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            if body.get("stream"):
                await self.stream(writer, words, due, chat=chat, usage=usage, options=body.get("stream_options"))
            else:
                await asyncio.sleep(due + (count - 1) * self.options.itl_s - time.monotonic())
                self.output_tokens += count
                answer = (
                    {"message": {"role": "assistant", "content": "".join(words)}} if chat else {"text": "".join(words)}
                )
                choice = {"index": 0, "finish_reason": "length", **answer}
                await _send(writer, 200, {"model": self.options.model, "choices": [choice], "usage": usage})
        finally:
            self.running -= 1
            self.slots.release()

    async def stream(
        self,
        writer: asyncio.StreamWriter,
        words: list[str],
        due: float,
        *,
        chat: bool,
        usage: Any,
        options: Any,
    ) -> None:
        """Send one server-sent event per token, each at its scheduled time."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, word in enumerate(words):
            await asyncio.sleep(due + number * self.options.itl_s - time.monotonic())
            last = "length" if number == len(words) - 1 else None
            choice = {
                "index": 0,
                "finish_reason": last,
                **({"delta": {"content": word}} if chat else {"text": word}),
            }
            _event(writer, {"model": self.options.model, "choices": [choice]})
            self.output_tokens += 1
            await writer.drain()
        if options and options.get("include_usage"):
            _event(writer, {"model": self.options.model, "choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def exposition(self) -> str:
        """Return the metrics in Prometheus' text format."""
        values = {
            "requests_running": self.running,
            "requests_waiting": self.waiting,
            "kv_use": self.running / self.options.max_num_seqs,
            "prompt_tokens_total": self.prompt_tokens,
            "output_tokens_total": self.output_tokens,
            "refused_requests_total": self.refused,
            "prefix_queries_tokens_total": self.prompt_tokens,
            "prefix_hits_tokens_total": 0,
            "preemptions_total": 0,
            "spec_drafted_tokens_total": 0,
            "spec_accepted_tokens_total": 0,
        }
        kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in values}
        return "".join(f"# TYPE fake:{name} {kinds[name]}\nfake:{name} {value}\n" for name, value in values.items())


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    data = f"data: {json.dumps(value)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _send(
    writer: asyncio.StreamWriter, status: int, value: Any, *, content_type: str = "application/json"
) -> None:
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


async def _main(options: argparse.Namespace) -> None:
    print(f"golden server for {options.model}", flush=True)
    await asyncio.sleep(options.startup_s)
    if options.fault == "out_of_memory":
        raise SystemExit("MemoryError: Unable to allocate 96.0 GiB for the KV cache")
    if options.fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if options.fault == "ignores_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fault == "leaves_child":
        sleeper = "import time; time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    golden = Golden(options)
    server = await asyncio.start_server(golden.serve, options.host, options.port, backlog=4096)
    print(f"listening on {options.host}:{options.port}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Parse the options and run the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="golden")
    parser.add_argument("--ttft-s", type=float, default=0.05)
    parser.add_argument("--itl-s", type=float, default=0.02)
    parser.add_argument("--startup-s", type=float, default=0.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-queued-reqs", type=int)
    parser.add_argument("--fault")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
