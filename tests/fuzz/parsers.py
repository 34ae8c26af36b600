"""Atheris' targets: readers of untrusted input in Python. Run by `tests/fuzz/run`, in the fuzzers' environment.

A reader may refuse its input with the error that its callers expect; any other exception is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["powerband"]):
    from powerband import engines
    from powerband.bench import importers
    from powerband.core import gguf, plain_data
    from powerband.core.model import from_config_json, from_gguf
    from powerband.core.workload import Workload
    from powerband.errors import InputError
    from powerband.evaluators import questions
    from powerband.load import generator, prompts, python_wire, tokens
    from powerband.serve.router import requests
    from powerband.store import documents

_WORDS = tokens.vocabulary(None)
_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-parsers-"))


def _documents(data: bytes) -> None:
    """A document of any kind: read it, and write it."""
    found = documents.parse(data.decode("utf-8", "replace"), source="fuzz.yaml")
    documents.parse(found.to_text(), source="again.yaml")
    found.to_json(), found.digest(), found.to_records()


def _gguf(data: bytes) -> None:
    """A GGUF header, and the model that it describes."""
    for vocabulary in (False, True):
        with contextlib.suppress(gguf.NotGguf):
            header = gguf.read_header(io.BytesIO(data), vocabulary=vocabulary)
            model = from_gguf(header, source="fuzz.gguf", weight_bytes=len(data))
            model.kv_elements_per_token()


def _config(data: bytes) -> None:
    """A model's config.json."""
    with contextlib.suppress(ValueError):
        config = plain_data.parse_json_object(data, finite=False)
        model = from_config_json(config, source="fuzz", weight_bytes=None)
        model.kv_elements_per_token()
        if model.shape:
            _ = model.shape.parameters + model.shape.active_parameters + model.shape.state_elements()


def _metrics(data: bytes) -> None:
    """Pages of metrics of every engine."""
    page, _, slots = data.decode("utf-8", "replace").partition("\0")
    for name in engines.names():
        engines.get(name).gauges({"/metrics": page, "/slots": slots})


def _sse(data: bytes) -> None:
    """A response that the Python wire reads, and the record that the generator makes of it."""

    async def read() -> python_wire.Finished:
        reader = asyncio.StreamReader(limit=1 << 20)
        request = python_wire._Request(1, 0, b"", -1, 0, bool(data[:1] == b"\1"))
        reader.feed_data(data[1:])
        reader.feed_eof()
        outcome = python_wire.BROKEN_OFF
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            await python_wire.Wire._read(_Counter(), reader, request)  # type: ignore[arg-type]
            outcome = python_wire.ANSWERED
        return request.finished(outcome)

    finished = asyncio.run(read())
    run = generator.Run()
    lines = list(generator._json_lines(finished.kept))
    generator._record(finished, lines, run, start_ns=0, max_tokens=1)
    "".join(map(generator._content, lines))


class _Counter:
    def count_first_token(self) -> None:
        """Ignore it."""


def _results(data: bytes) -> None:
    """Results of other tools, traces, datasets and questions."""
    how, text = data[:1], data[1:]
    path = _FOLDER / ("fuzz.csv" if how == b"c" else "fuzz.jsonl")
    path.write_bytes(text)
    if how in (b"c", b"t"):
        trace = {"arrivals": {"process": "trace"}, "trace": {"path": str(path), "first": 50}}
        prompts.prepare(Workload.model_validate(trace), 60, vocabulary=_WORDS)
    elif how == b"d":
        chats = {"arrivals": {"process": "poisson", "rate_per_s": 1}, "dataset": {"path": str(path)}}
        workload = Workload.model_validate(chats | {"output": {"shape": "fixed", "tokens": 4}})
        prompts.prepare(workload, 20, vocabulary=_WORDS)
    elif how == b"q":
        questions.read(text.decode("utf-8", "replace"), source="fuzz.jsonl")
    else:
        importers.read(path).to_json()


def _requests(data: bytes) -> None:
    """The body of a request at the fleet's door."""
    with contextlib.suppress(requests.RequestRejected):
        requests.read(data)


_TARGETS: dict[str, Callable[[bytes], None]] = {
    "documents": _documents,
    "gguf": _gguf,
    "config": _config,
    "metrics": _metrics,
    "sse": _sse,
    "results": _results,
    "requests": _requests,
}


def main() -> None:
    """Fuzz the target that the first argument names; the others are libFuzzer's."""
    target = _TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        with contextlib.suppress(InputError):
            target(data)

    os.chdir(_FOLDER)
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
