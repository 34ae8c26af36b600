"""Quantizers: the commands that create a variant, and the inputs that are rejected before any of them runs."""

import re

import pytest

from powerband import catalog, quantize, quantizers
from powerband.core.model import Model
from powerband.errors import InputError
from powerband.quantizers import llmcompressor
from powerband.quantizers.base import Job
from powerband.quantizers.llmcompressor import UNQUANTIZED

TOOLS = {"python": "python", "converters": "conv", "llama-imatrix": "imatrix", "llama-quantize": "quantize"}


def model(**changes: object) -> Model:
    facts = {
        "source": "models/tiny",
        "format": "safetensors",
        "weight_format": "bf16",
        "hidden": 576,
        "feed_forward": 1536,
    }
    return Model.model_validate(facts | changes)


def titles(scheme: str, **changes: object) -> list[str]:
    job = Job(
        model=model(**changes),
        weights="tiny",
        scheme=scheme,
        folder="out",
        shared="base",
        samples="s.jsonl",
        plain_text="s.txt",
        threads=2,
    )
    return [step.title for step in quantizers.for_scheme(scheme).steps(job, TOOLS)]


def test_gguf_steps_convert_compute_the_importance_matrix_and_quantize() -> None:
    assert titles("q4_k_m") == ["convert to GGUF", "compute the importance matrix", "quantize to q4_k_m"]
    assert titles("q8_0") == ["convert to GGUF", "quantize to q8_0"]  # needs no importance matrix
    assert titles("f16") == ["convert to GGUF"]
    assert titles("q4_0", format="gguf", weight_format="f16") == titles("q4_0")[1:]


def test_the_file_is_named_for_model_and_scheme() -> None:
    job = Job(model=model(), weights="tiny", scheme="q4_k_m", folder="out", shared="base", threads=2)
    last = quantizers.for_scheme("q4_k_m").steps(job, TOOLS)[-1]
    assert last.argv == ("quantize", "base/base.gguf", "out/tiny.Q4_K_M.gguf", "Q4_K_M", "2")


def test_a_group_size_must_divide_the_rows() -> None:
    assert llmcompressor.group_size(model()) == 64
    assert llmcompressor.group_size(model(hidden=4096, feed_forward=14336)) == 128
    with pytest.raises(InputError, match="rows of 570"):
        quantizers.for_scheme("w4a16-gptq").check(model(hidden=570, feed_forward=None), "w4a16-gptq")


def test_a_quantized_model_is_not_quantized_again() -> None:
    with pytest.raises(InputError, match="already quantized"):
        quantizers.for_scheme("q4_k_m").check(model(format="gguf", weight_format="q4_1"), "q4_k_m")
    with pytest.raises(InputError, match="already quantized"):
        quantizers.for_scheme("w8a8-int8").check(model(weight_format="fp8"), "w8a8-int8")


def test_word_coverage_is_the_share_of_words_that_other_texts_contain() -> None:
    assert quantize._word_coverage(["the cat sat"], ["The dog sat"]) == pytest.approx(2 / 3)


def test_an_unknown_scheme_gets_a_hint() -> None:
    with pytest.raises(InputError, match="Did you mean"):
        quantizers.for_scheme("q4_k_n")


def test_every_scheme_of_a_quantizer_is_in_the_catalogue() -> None:
    assert set(quantizers.schemes()) <= set(catalog.names("scheme"))


def test_calibration_texts_are_interleaved_and_disjoint_from_evaluation_texts() -> None:
    mixed = catalog.calibration_texts()
    assert len(mixed) >= 128 and "def " in mixed[1]
    judging = {"\n".join(one.get("turns") or [one["text"]]) for kind in catalog.CLASSES for one in catalog.texts(kind)}
    assert not judging & set(mixed)


@pytest.mark.parametrize(
    ("module", "kept"),
    [
        ("lm_head", True),
        ("model.layers.0.mlp.gate", True),  # Qwen3-MoE, DeepSeek
        ("model.layers.0.mlp.shared_expert_gate", True),  # Qwen2-MoE
        ("model.layers.0.block_sparse_moe.gate", True),  # Mixtral
        ("model.layers.0.mlp.router", True),  # gpt-oss
        ("model.layers.0.feed_forward.router", True),  # Llama 4
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.experts.7.gate_proj", False),
        ("model.layers.0.self_attn.q_proj", False),
    ],
)
def test_routers_stay_in_16_bits(module: str, kept: bool) -> None:
    patterns = [one.removeprefix("re:") if one.startswith("re:") else re.escape(one) for one in UNQUANTIZED]
    assert any(re.fullmatch(one, module) for one in patterns) == kept
