"""Hostile files, written by hand and by a mutation fuzzer, and what the command line does with them.

Each command runs in a process of its own with a limit on memory and time. The processes are forked from one that has
imported the package.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import runpy
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from support import fuzz_seeds

MAX_MEMORY_BYTES = 2**30  # of address space that a command may take beyond what it has at the start
TIMEOUT_S = 30
_DEEP = 100_000
_PLAN = ("--on", "l40s:1", "--workload", "chat")
_WORKLOAD = "powerband: workload/1\noutput: {shape: fixed, tokens: 4}\n"
_CONFIG = json.loads(fuzz_seeds.SEEDS["config"][0])


@dataclass(frozen=True)
class Case:
    """A hostile file: its name, the command for it, and whether the command ignores what is hostile."""

    name: str
    argv: tuple[str, ...]
    harmless: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `signal` is 0 if it ended by itself."""

    case: Case
    code: int
    signal: int
    message: str
    seconds: float
    peak_bytes: int

    def problem(self, *, may_succeed: bool = False) -> str:
        """Return what is wrong with it; empty if it refused the file with a sentence and a hint."""
        if self.signal:
            cause = "it took too long" if self.signal == signal.SIGALRM else f"signal {self.signal}"
            return f"{self.case.name}: ended by {cause}"
        if self.code == 0 and (may_succeed or self.case.harmless):
            return ""
        if self.code != 2 or self.case.harmless:
            return f"{self.case.name}: exit {self.code}: {self.message[-400:]}"
        if not self.message.startswith("error: ") or "\nhint: " not in self.message or "Traceback" in self.message:
            return f"{self.case.name}: no sentence with a hint: {self.message[-400:]}"
        return ""


def run(case: Case) -> Outcome:
    """Run the command of a case in a forked process, with limits."""
    with tempfile.TemporaryFile("w+") as told:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(case, told.fileno())
        _, status, usage = os.wait4(child, 0)
        took_s = time.monotonic() - began
        told.seek(0)
        message = told.read()
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Outcome(case, code, ended_by, message, took_s, usage.ru_maxrss * 1024)


def _child(case: Case, told: int) -> None:
    """Run the command and exit; its standard error goes to a file."""
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + MAX_MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(told, 2)
        sys.argv = ["powerband", *case.argv]
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        from powerband.cli.main import main

        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def preload(folder: Path) -> None:
    """Import what the commands import, so that forked processes start at once."""
    (folder / "preload.yaml").write_text("powerband: slo/1\nttft: {p50: 1s}\n")
    config = folder / "preload.json"
    config.write_text(json.dumps(_CONFIG))
    for argv in (["show", str(folder / "preload.yaml")], ["plan", str(config), *_PLAN], ["show", "chat"]):
        sys.argv = ["powerband", *argv]
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                runpy.run_module("powerband", run_name="__main__")
        except SystemExit:
            pass


def by_hand(folder: Path) -> list[Case]:
    """Write the files that a person thought of; return their commands."""
    found = [*_documents(folder), *_special_files(folder), *_models(folder), *_data(folder)]
    assert len({one.name for one in found}) == len(found)
    return found


def _documents(folder: Path) -> Iterator[Case]:
    deep_block = "".join(f"{' ' * depth}x:\n" for depth in range(300))
    aliases = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 12))
    texts: dict[str, str | bytes] = {
        "empty": "",
        "only a header": "powerband: recipe/1\n",
        "a header of another kind": "powerband: nonsense/1\n",
        "a schema number without end": f"powerband: slo/{'9' * 5000}\n",
        "aliases that grow ninefold": f"powerband: slo/1\nx0: &x0 [1]\n{aliases}",
        "an alias of itself": "powerband: slo/1\nx: &x [*x]\n",
        "brackets without end": "powerband: slo/1\nx: " + "[" * _DEEP,
        "nested lists": "powerband: slo/1\nx:\n " + "- " * _DEEP + "a\n",
        "nested blocks": f"powerband: slo/1\n{deep_block}",
        "a list of 200,000 at the top": "- a\n" * 200_000,
        "300,000 keys": "powerband: slo/1\n" + "".join(f"k{n}: 1\n" for n in range(300_000)),
        "5,000 unknown keys": "powerband: slo/1\n" + "".join(f"k{n}: 1\n" for n in range(5000)),
        "a key of 10 MB": '{"powerband": "slo/1", "' + "k" * 10_000_000 + '": 1}',
        "a duplicate key": "powerband: slo/1\nttft: {p50: 1s}\nttft: {p50: 2s}\n",
        "a duplicate key in JSON": '{"powerband": "slo/1", "ttft": {"p50": 1}, "ttft": {"p50": 2}}',
        "NaN in JSON": '{"powerband": "slo/1", "ttft": {"p50": NaN}}',
        "infinity": "powerband: slo/1\nttft: {p50: 1e999}\n",
        "a number of 10,000 digits": f"powerband: slo/1\nttft: {{p50: {'9' * 10_000}}}\n",
        "a number of 10,000 digits in JSON": '{"powerband": "slo/1", "ttft": {"p50": ' + "9" * 10_000 + "}}",
        "an integer of 100 digits": f'{{"powerband": "workload/1", "seed": {"9" * 100}}}',
        "deep JSON": '{"powerband": "slo/1", "x": ' + "[" * _DEEP + "]" * _DEEP + "}",
        "JSON of depth 500": '{"powerband": "slo/1", "x": ' + "[" * 500 + "]" * 500 + "}",
        "a lone surrogate": '{"powerband": "slo/1", "name": "\\ud800", "ttft": {"p50": 1}}',
        "escape sequences": b'powerband: slo/1\n"\\e]0;owned\\a\\e[2J": 1\n',
        "a tag of Python": "powerband: slo/1\nx: !!python/object/apply:os.system [id]\n",
        "tags without sense": "powerband: slo/1\nx: !!float a\ny: !!timestamp b\nz: !!bool c\n",
        "bytes": "powerband: slo/1\nname: !!binary aGVsbG8=\nttft: {p50: 1s}\n",
        "a key that is a list": "powerband: slo/1\n? [a, b]\n: c\n",
        "not UTF-8": b"powerband: slo/1\nname: \xff\xfe\xfa\n",
        "UTF-16": "powerband: slo/1\n".encode("utf-16"),
        "NUL bytes": b"powerband: slo/1\n\0\0\0",
        "binary": bytes(range(256)) * 400,
        "two documents": "powerband: slo/1\nttft: {p50: 1s}\n---\npowerband: slo/1\n",
        "a recipe of lists": "powerband: recipe/1\ndeployment: []\nworkload: []\npromise: []\nevidence: []\n",
        "an engine with a path": "powerband: deployment/1\nengine: ../../etc/passwd\nvariant: {source: x}\n",
    }
    for name, text in texts.items():
        path = folder / f"{name.replace(' ', '-').replace(',', '')}.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        yield Case(name, ("check", str(path)))
    sparse = folder / "sparse.yaml"
    with sparse.open("wb") as stream:
        stream.truncate(2**40)
    yield Case("a sparse file of 1 TB", ("show", str(sparse)))


def _special_files(folder: Path) -> Iterator[Case]:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "folder.yaml").mkdir()
    for name, file in (
        ("a pipe without a writer", "pipe.yaml"),
        ("a symlink to itself", "loop.yaml"),
        ("a symlink to /dev/zero", "zero.yaml"),
        ("a directory", "folder.yaml"),
        ("a name of 5,000 characters", "x" * 5000 + ".yaml"),
        ("a file that is missing", "missing.yaml"),
    ):
        yield Case(name, ("show", str(folder / file)))


def _models(folder: Path) -> Iterator[Case]:
    yield Case("a model with a name of 5,000 characters", ("plan", "x" * 5000, *_PLAN))
    string, architecture = _string, _string(b"general.architecture")
    start = b"GGUF" + struct.pack("<I", 3)
    one_pair = start + struct.pack("<QQ", 0, 1)
    ggufs = {
        "no GGUF": b"\x7fELF" + bytes(100),
        "a GGUF of 4 bytes": b"GGUF",
        "a GGUF of version 99": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "a GGUF with 2^64 entries": start + struct.pack("<QQ", 0, 2**64 - 1),
        "a GGUF with 2^64 tensors": start + struct.pack("<QQ", 2**64 - 1, 0),
        "a GGUF with a string of 2^63 bytes": one_pair + struct.pack("<Q", 2**63) + b"abc",
        "a GGUF with an array of 2^60 texts": one_pair + architecture + struct.pack("<IIQ", 9, 8, 2**60),
        "a GGUF with an array of 2^60 bytes": one_pair + architecture + struct.pack("<IIQ", 9, 0, 2**60),
        "a GGUF with nested arrays": one_pair + architecture + struct.pack("<IIQ", 9, 9, 2) * 1000,
        "a GGUF with a type 77": one_pair + architecture + struct.pack("<I", 77) + bytes(8),
        "a GGUF with 2^31 dimensions": start + struct.pack("<QQ", 1, 0) + string(b"w") + struct.pack("<I", 2**31),
        "a GGUF of another sort": start + struct.pack("<QQ", 0, 2) + architecture + struct.pack("<I", 8) + string(b"x")
        + string(b"x.block_count") + struct.pack("<I", 8) + string(b"many"),
        "a GGUF with 10^9 layers": start + struct.pack("<QQ", 0, 2) + architecture + struct.pack("<I", 8)
        + string(b"x") + string(b"x.block_count") + struct.pack("<II", 4, 10**9),
    }  # fmt: skip
    for name, data in ggufs.items():
        path = folder / f"{name.replace(' ', '-').replace('^', '')}.gguf"
        path.write_bytes(data)
        yield Case(name, ("plan", str(path), *_PLAN))
    sparse = folder / "sparse.gguf"
    sparse.write_bytes(start + struct.pack("<QQ", 10**6, 0))
    with sparse.open("r+b") as stream:
        stream.truncate(2**40)
    yield Case("a sparse GGUF of 1 TB", ("plan", str(sparse), *_PLAN))
    configs: dict[str, object] = {
        "a list": [1, 2],
        "10^12 layers": _CONFIG | {"num_hidden_layers": 10**12, "layer_types": None},
        "negative sizes": _CONFIG | {"hidden_size": -8},
        "texts for numbers": _CONFIG | {"hidden_size": "8", "num_attention_heads": "x"},
        "numbers for texts": _CONFIG | {"architectures": 7, "layer_types": 5},
        "sizes of 2^200": _CONFIG | {"vocab_size": 2**200},
        "a text_config that is a list": _CONFIG | {"text_config": [1]},
        "a quantization that is a text": _CONFIG | {"quantization_config": "fp8"},
    }
    for name, config in configs.items():
        yield Case(f"a config with {name}", ("plan", str(_model(folder, name, json.dumps(config))), *_PLAN))
    yield Case("a config that is deep", ("plan", str(_model(folder, "deep", "[" * _DEEP)), *_PLAN))
    odd = _model(folder, "safetensors", json.dumps(_CONFIG))
    (odd / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{" * 100)
    (odd / "chat_template.jinja").write_text("{% for a in range(10**9) %}{{ ''.__class__.__mro__ }}")
    yield Case("a header of safetensors and a chat template", ("plan", str(odd), *_PLAN), harmless=True)
    for name, tokenizer in (("broken", "{" * 1000), ("of another sort", '{"model": {"type": "BPE", "vocab": 3}}')):
        place = _model(folder, f"tokenizer {name}", json.dumps(_CONFIG))
        (place / "tokenizer.json").write_text(tokenizer)
        yield Case(f"a tokenizer {name}", ("show", "chat", "--tokenizer", str(place)))
    merges = start + struct.pack("<QQ", 0, 3) + string(b"tokenizer.ggml.model") + struct.pack("<I", 8) + string(b"gpt2")
    for key, values in ((b"tokenizer.ggml.tokens", [b"a"]), (b"tokenizer.ggml.merges", [b"nospace"])):
        merges += string(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))
    (folder / "merges.gguf").write_bytes(merges)
    yield Case("merges that merge nothing", ("show", "chat", "--tokenizer", str(folder / "merges.gguf")))


def _data(folder: Path) -> Iterator[Case]:
    rows = {
        "a trace of texts": '{"timestamp": "now", "input_length": "x", "output_length": []}\n',
        "a trace of 10^15 tokens": '{"timestamp": 0, "input_length": 1000000000000000, "output_length": 1}\n',
        "a trace with negative ids": '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n',
        "a trace with one endless line": '{"timestamp": ' + "0" * 20_000_000,
        "a trace of lists": "[]\n" * 10,
    }
    for name, text in rows.items():
        workload = folder / f"{name.replace(' ', '-').replace('^', '')}.yaml"
        workload.with_suffix(".jsonl").write_text(text)
        trace = f"powerband: workload/1\narrivals: {{process: trace}}\ntrace: {{path: {workload.stem}.jsonl}}\n"
        workload.write_text(trace)
        yield Case(name, ("show", str(workload)))
    chats = folder / "chats.yaml"
    (folder / "chats.jsonl").write_text('{"messages": [1, 2]}\n')
    chats.write_text(f"{_WORKLOAD}arrivals: {{process: poisson, rate_per_s: 1}}\ndataset: {{path: chats.jsonl}}\n")
    yield Case("a dataset of numbers", ("show", str(chats)))
    results = {
        "results that are deep": "[" * _DEEP,
        "results of lists": '{"benchmarks": [[], []]}',
        "results of huge numbers": '{"start_times": [1e308, 1], "ttfts": [1e308, 1e308], "itls": [[1e308], [1]],'
        ' "input_lens": [1e308, 2], "output_lens": [2, 2], "errors": ["", ""]}',
    }
    for name, text in results.items():
        path = folder / f"{name.replace(' ', '-')}.json"
        path.write_text(text)
        yield Case(name, ("import", str(path), "--output", str(folder / "measurement.json")))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _model(folder: Path, name: str, config: str) -> Path:
    place = folder / f"model-{name.replace(' ', '-').replace('^', '')}"
    place.mkdir()
    (place / "config.json").write_text(config)
    (place / "model.safetensors").write_bytes(bytes(100))
    return place


_DICTIONARY = (
    b"[[[[", b"{{{{", b"&a ", b"*a", b"- ", b"!!binary ", b"!!set ", b"1e999", b"-1", b"NaN", b"null", b"true", b"\x00",
    b"\xff", b"99999999999999999999", b"? ", b": ", b"\n", b'"', b"\\ud800", b"powerband: ", b"~", b"0x", b"1_0",
)  # fmt: skip


def fuzzed(folder: Path, count: int, *, seed: int = 1, originals: tuple[Path, ...]) -> Iterator[Case]:
    """Write mutations of documents, models and results; yield the command for each."""
    choose = random.Random(seed)
    texts = [(path.suffix, path.read_bytes()) for path in originals]
    texts += [(".yaml", one) for one in fuzz_seeds.SEEDS["documents"]]
    texts += [(".gguf", one) for one in fuzz_seeds.SEEDS["gguf"]] * 4
    texts += [(".config", one) for one in fuzz_seeds.SEEDS["config"]] * 4
    texts += [(".results", one[1:]) for one in fuzz_seeds.SEEDS["results"][:3]] * 2
    for number in range(count):
        suffix, text = texts[number % len(texts)]
        data = mutated(text, choose, texts[choose.randrange(len(texts))][1])
        name = f"fuzzed {number}"
        if suffix == ".config":
            place = _model(folder, name, "")
            (place / "config.json").write_bytes(data)
            yield Case(name, ("plan", str(place), *_PLAN))
            continue
        path = folder / f"fuzzed-{number}{suffix}"
        path.write_bytes(data)
        command: tuple[str, ...] = ("show", str(path))
        if suffix == ".gguf":
            command = ("plan", str(path), *_PLAN)
        elif suffix == ".results":
            command = ("import", str(path), "--output", str(folder / "measurement.json"))
        yield Case(name, command)


def mutated(data: bytes, choose: random.Random, other: bytes) -> bytes:
    """Return the bytes after one to six changes: bits, numbers, words, cuts, repetitions, parts of another file."""
    found = bytearray(data)
    changes: tuple[Callable[[int, int], bytes], ...] = (
        lambda begin, end: bytes([choose.randrange(256)]),
        lambda begin, end: choose.choice(_DICTIONARY),
        lambda begin, end: b"",
        lambda begin, end: bytes(found[begin:end]) * choose.choice((2, 3, 50)),
        lambda begin, end: other[begin % (len(other) + 1) :][: choose.randrange(1, 200)],
        lambda begin, end: str(choose.choice((-1, 0, 2**31, 2**63, 2**64, 10**30, 1e308))).encode(),
    )
    for _ in range(choose.randrange(1, 7)):
        begin = choose.randrange(len(found) + 1)
        end = min(len(found), begin + choose.choice((0, 1, 1, 2, 4, 16, 64)))
        found[begin:end] = choose.choice(changes)(begin, end)
    return bytes(found)
