"""Models read from config.json and from complete, truncated and corrupt GGUF headers."""

import io
import struct
from typing import Any

import pytest

from powerband.core import gguf, hub_id
from powerband.core.model import Model, from_config_json, from_gguf

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "dtype": "bfloat16",
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(pairs: dict[str, Any]) -> bytes:
    """Write a GGUF header with strings, unsigned integers and string arrays."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, value in pairs.items():
        data += text(key)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            data += struct.pack("<II", 4, value)
    return data


PAIRS = {
    "general.architecture": "llama",
    "general.file_type": 3,
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.context_length": 8192,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(5000)],
    "tokenizer.ggml.model": "gpt2",
}


def test_a_config_json_gives_the_architecture() -> None:
    model = from_config_json(SMOLLM2, source="x", weight_bytes=269_000_000)
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert model.kv_elements_per_token() == 2 * 30 * 3 * 64


def test_a_multimodal_config_is_read_from_text_config() -> None:
    model = from_config_json({"architectures": ["X"], "text_config": SMOLLM2}, source="x", weight_bytes=None)
    assert model.layers == 30


def test_a_gguf_header_gives_the_same_architecture() -> None:
    read = gguf.read_header(io.BytesIO(header(PAIRS)))
    model = from_gguf(read, source="x.gguf", weight_bytes=98_000_000)
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert (model.context_tokens, model.vocabulary, model.quantization) == (8192, 5000, "q4_1")


@pytest.mark.parametrize("cut", [0, 3, 8, 20, 60, 200, 5000])
def test_a_truncated_header_is_refused(cut: int) -> None:
    with pytest.raises(gguf.NotGguf):
        gguf.read_header(io.BytesIO(header(PAIRS)[:cut]))


@pytest.mark.parametrize(
    "data", [b"PK\3\4" + b"x" * 100, b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF" + b"\xff" * 64]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(gguf.NotGguf):
        gguf.read_header(io.BytesIO(data))


@pytest.mark.parametrize(
    ("source", "parts", "name"),
    [
        ("acme/tiny-1b", ("acme/tiny-1b", None, None), "tiny-1b"),
        ("acme/tiny-1b@refs/pr/3", ("acme/tiny-1b", "refs/pr/3", None), "tiny-1b"),
        ("acme/tiny.v2@main:q4/tiny-q4.gguf", ("acme/tiny.v2", "main", "q4/tiny-q4.gguf"), "tiny-q4"),
        ("a/b", ("a/b", None, None), "b"),
        ("a-b_c/tiny_", ("a-b_c/tiny_", None, None), "tiny_"),
        (f"acme/{'b' * 91}", (f"acme/{'b' * 91}", None, None), "b" * 91),
    ],
)
def test_a_hub_id_has_a_revision_and_a_file(source: str, parts: tuple[str, ...], name: str) -> None:
    found = hub_id.parse(source)
    assert found and (found.repo, found.revision, found.file) == parts and str(found) == source
    assert Model(source=source).name == name


def test_a_hub_id_is_short_in_messages() -> None:
    pinned, branch = hub_id.parse(f"acme/tiny@{'a' * 40}:b.gguf"), hub_id.parse("acme/tiny@main")
    assert pinned and pinned.pinned and pinned.short == "acme/tiny@aaaaaaa:b.gguf"
    assert branch and not branch.pinned and branch.short == "acme/tiny@main"


@pytest.mark.parametrize(
    "path", ["models/tiny.gguf", "/models/tiny", "./tiny", "~/tiny", "tiny", "a/b/c", "a/b.safetensors", "http://a/b"]
)
def test_a_path_is_not_a_hub_id(path: str) -> None:
    assert hub_id.parse(path) is None


@pytest.mark.parametrize(
    "name",
    [
        "out/step--100",
        "runs/model-",
        "runs-/model",
        "runs/model.",
        "a/b..c",
        "x/y.git",
        "acme/mod\u00e8le",
        f"acme/{'b' * 92}",
        "out/step--100@main",
    ],
)
def test_a_name_that_the_hub_refuses_is_not_a_hub_id(name: str) -> None:
    assert hub_id.parse(name) is None
