"""Shapes and schemes against published figures of real models."""

import json
from typing import Any

import pytest

from powerband import catalog
from powerband.core import shape as shapes
from powerband.core.scheme import Scheme
from powerband.core.shape import Shape
from powerband.store import documents

LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
LLAMA_70B = "meta-llama/Meta-Llama-3.1-70B"


def shape(name: str) -> Shape:
    found = shapes.from_config_json(json.loads(catalog.text("model", name)))
    assert found is not None
    return found


def scheme(name: str) -> Scheme:
    found = documents.find("scheme", name)
    assert isinstance(found, Scheme)
    return found


# Parameters of the model cards; bytes of the tensors in the published checkpoints (`total_size` of their index).
@pytest.mark.parametrize(
    ("name", "parameters", "scheme_name", "checkpoint"),
    [
        (LLAMA_8B, 8_030_261_248, "bf16", 16_060_522_496),
        (LLAMA_70B, 70_553_706_496, "bf16", 141_107_412_992),
        ("meta-llama/Meta-Llama-3.1-405B", 405_853_388_800, "bf16", 811_706_777_600),
        ("Qwen/Qwen3-32B", 32_762_123_264, "bf16", 65_524_246_528),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, "bf16", 93_405_585_408),
        ("deepseek-ai/DeepSeek-V3", 671_026_404_352, "fp8-dynamic", 688_586_727_753),
        ("openai/gpt-oss-120b", 116_829_156_672, "mxfp4", 65_248_815_744),
    ],
)
def test_parameters_and_checkpoints(name: str, parameters: int, scheme_name: str, checkpoint: int) -> None:
    assert shape(name).parameters == pytest.approx(parameters, rel=0.0005)
    assert scheme(scheme_name).weight_bytes(shape(name), with_mtp=True) == pytest.approx(checkpoint, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        (LLAMA_8B, 131_072),
        (LLAMA_70B, 327_680),
        ("meta-llama/Meta-Llama-3.1-405B", 516_096),
        ("Qwen/Qwen3-32B", 262_144),
        ("mistralai/Mixtral-8x7B-v0.1", 131_072),
        ("deepseek-ai/DeepSeek-V3", 70_272),  # 61 layers with 512 + 64 elements each, independent of the heads
        ("openai/gpt-oss-120b", 73_728),
    ],
)
def test_kv_bytes_of_a_token_in_bf16(name: str, kv_bytes: int) -> None:
    assert 2 * shape(name).kv_elements() == kv_bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-ai/DeepSeek-V3", 36.6), ("openai/gpt-oss-120b", 5.1), ("mistralai/Mixtral-8x7B-v0.1", 12.8)],
)
def test_active_parameters_of_mixture_of_experts(name: str, billions: float) -> None:
    assert shape(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_sliding_window_bounds_the_kv_cache() -> None:
    gpt = shape("openai/gpt-oss-120b")  # every other layer has a window of 128 tokens
    assert gpt.kv_elements(10_000) == 18 * 1024 * 10_000 + 18 * 1024 * 128


def test_linear_attention_has_a_state_and_no_kv_cache() -> None:
    hybrid = shape("Qwen/Qwen3.5-397B-A17B")
    assert hybrid.kv_elements() == 15 * 2 * 2 * 256
    assert hybrid.state_elements() > 45 * 64 * 128 * 128


def test_a_gguf_header_gives_the_same_shape() -> None:
    header: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 32,
        "llama.embedding_length": 4096,
        "llama.feed_forward_length": 14336,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.vocab_size": 128256,
    }
    assert shapes.from_gguf(header) == shape(LLAMA_8B)


def test_tied_embeddings_are_counted_once() -> None:
    assert shape("Qwen/Qwen3-0.6B").parameters == pytest.approx(596_049_920, rel=0.001)


def test_an_incomplete_config_has_no_shape() -> None:
    assert shapes.from_config_json({"hidden_size": 64}) is None
