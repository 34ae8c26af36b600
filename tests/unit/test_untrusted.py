"""Limits of what is read from untrusted files and servers."""

import io
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from powerband import engines, observe, untrusted
from powerband.core import gguf, plain_data, yaml12
from powerband.core.model import from_config_json
from powerband.errors import DocumentError, InputError, did_you_mean
from powerband.load import generator
from powerband.load.python_wire import Finished
from powerband.runtime import hub_files


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 66 + "]" * 66, "nested"),
        ("[" * 100_000, "nested"),
        (f"[{2**64 + 1}]", "integers"),
        ("[1e999]", "finite"),
        ("[NaN]", "finite"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('"\\ud800"', "surrogates"),
    ],
)
def test_json_over_a_limit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plain_data.parse_json(text)


def test_json_at_the_limits_is_read() -> None:
    assert plain_data.parse_json("[" * 64 + "]" * 64)
    assert plain_data.parse_json(f"[{2**64}, {-(2**64)}, 1e308]") == [2**64, -(2**64), 1e308]
    assert plain_data.parse_json_object('{"a": Infinity}', finite=False)
    with pytest.raises(ValueError, match="not an object"):
        plain_data.parse_json_object("[]")


def test_the_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MAX_VALUES", 10)
    plain_data.check([[1, 2], {"a": 3}])
    with pytest.raises(ValueError, match="more than 10 values"):
        plain_data.check([[1] * 5, [2] * 5])


def test_yaml_at_the_limits_is_read() -> None:
    deep = "x: " + "[" * 60 + "]" * 60
    assert yaml12.read(deep, source="f")[0]
    shared = "a: &a [1, 2]\nb: [*a, *a]\n"
    assert yaml12.read(shared, source="f")[0] == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("limit", ["MAX_CHARACTERS", "MAX_NODES"])
def test_the_size_of_yaml_is_limited(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml12, limit, 20)
    with pytest.raises(DocumentError, match="too large"):
        yaml12.read("x: [a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a]\n", source="f")


def _gguf(*pairs: bytes, tensors: int = 0) -> io.BytesIO:
    return io.BytesIO(b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs)) + b"".join(pairs))


def _array(key: bytes, code: int, count: int, data: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, code, count) + data


def test_arrays_of_a_gguf_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MAX_ELEMENTS", 10)
    pairs = [_array(b"a", 0, 6, bytes(6)), _array(b"b", 0, 4, bytes(4))]
    assert gguf.read_header(_gguf(*pairs))["b"] == [0] * 4
    with pytest.raises(gguf.NotGguf, match="more than 10 elements"):
        gguf.read_header(_gguf(*pairs, _array(b"c", 0, 1, bytes(1))))
    with pytest.raises(gguf.NotGguf, match="has 11 elements"):
        gguf.read_header(_gguf(_array(b"c", 8, 11, bytes(88))))


def test_the_bytes_of_a_gguf_header_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    header = _gguf(_array(b"a", 0, 6, bytes(6)))
    size = len(header.getvalue())
    monkeypatch.setattr(gguf, "MAX_BYTES", size)
    gguf.read_header(header)
    monkeypatch.setattr(gguf, "MAX_BYTES", size - 1)
    header.seek(0)
    with pytest.raises(gguf.NotGguf, match="more than"):
        gguf.read_header(header)


@pytest.mark.parametrize("limit", ["MAX_PAIRS", "MAX_TENSORS"])
def test_the_entries_of_a_gguf_are_limited(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, limit, 0)
    tensor = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 8, 0, 0)
    with pytest.raises(gguf.NotGguf, match="claims"):
        gguf.read_header(io.BytesIO(_gguf(_array(b"a", 0, 0, b""), tensors=1).getvalue() + tensor))


def test_a_config_of_impossible_numbers_is_refused() -> None:
    config: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 9}
    assert from_config_json(config, source="x", weight_bytes=None).layers == 2
    for wrong in ({"num_hidden_layers": 10_001}, {"hidden_size": -8}, {"vocab_size": 2**64}, {"architectures": 3}):
        with pytest.raises(InputError, match="does not describe a model"):
            from_config_json(config | wrong, source="x", weight_bytes=None)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("12345")
    assert untrusted.text(path, max_bytes=5) == "12345"
    with pytest.raises(InputError, match="the limit is 4"):
        untrusted.text(path, max_bytes=4)


def test_a_line_is_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("123\n1234\n")
    assert list(untrusted.lines(path)) == ["123\n", "1234\n"]
    monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", 4)
    with pytest.raises(InputError, match="a line over 4 bytes"):
        list(untrusted.lines(path))


@pytest.mark.parametrize(
    "event",
    [
        {"usage": [1]},
        {"usage": {"prompt_tokens": "7", "completion_tokens": -1}},
        {"usage": {"prompt_tokens": 2**40, "completion_tokens": 1e300}},
        {"timings": {"prompt_ms": "x"}},
        {"timings": {"prompt_ms": 1e300}},
        {"timings": 7},
        {"choices": 7},
        {"choices": [7, None, {"delta": 7, "finish_reason": [1]}]},
    ],
)
def test_events_of_another_kind_are_recorded_without_numbers(event: dict[str, Any]) -> None:
    times = array("q", [5, 9]).tobytes()
    finished = Finished(1, 0, 1, 2, 5, 9, 200, 0, 1, 0, 100, times, json.dumps(event).encode())
    run = generator.Run()
    lines = list(generator._json_lines(finished.kept))
    generator._record(finished, lines, run, start_ns=0, max_tokens=2)
    assert [run.records[name][0] for name in ("prompt", "output", "engine_us", "chunks")] == [0, 0, 0, 2]
    assert "".join(map(generator._content, lines)) == ""


def test_malformed_metrics_are_unknown() -> None:
    page = "vllm:num_requests_running 2\nvllm:num_requests_waiting{ 1\nvllm:kv_cache_usage_perc NaN\n"
    found = engines.get("vllm").gauges({"/metrics": page})
    assert (found.running, found.queue_depth, found.kv_use) == (2.0, None, None)
    slots = '[{"n_ctx": 1e308, "is_processing": true, "n_prompt_tokens": 1e308}, 7]'
    assert engines.get("llamacpp").gauges({"/metrics": "", "/slots": slots}).kv_use is None


def test_captured_requests_with_impossible_numbers_are_refused() -> None:
    row: dict[str, Any] = dict.fromkeys(("timestamp", "input_length", "output_length", "characters", "turns"), 1)
    row["hash_ids"] = [1]
    assert observe._record(json.dumps(row), Path("t"), 1) == row
    for wrong in ({"turns": -1}, {"timestamp": "x"}, {"hash_ids": ["a"]}, {"hash_ids": 3}, {"characters": None}):
        with pytest.raises(InputError, match="t:1: not a captured request"):
            observe._record(json.dumps(row | wrong), Path("t"), 1)


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"w": "../../etc/passwd"}}', "in another folder"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "in another folder"),
        ('{"weight_map": ', "not valid JSON"),
    ):
        index.write_text(text)
        with pytest.raises(InputError, match=message):
            hub_files.indexed(index)
    index.write_text('{"weight_map": {"v": "a.safetensors", "w": "b.safetensors", "x": "b.safetensors"}}')
    assert hub_files.indexed(index) == {"a.safetensors", "b.safetensors"}
    index.write_text('{"weight_map": [1]}')
    assert hub_files.indexed(index) == set()


def test_no_suggestion_is_sought_for_a_word_of_megabytes() -> None:
    assert did_you_mean("ttfd", ["ttft"]) and did_you_mean("t" * 10_000_000, ["ttft"]) == ""
