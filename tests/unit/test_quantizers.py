"""How variants are made: the commands, in order, and what is refused before any of them runs."""

import pytest

from powerband import catalog, quantize, quantizers
from powerband.core.model import Model
from powerband.errors import InputError
from powerband.quantizers import llmcompressor
from powerband.quantizers.base import Job

TOOLS = {"python": "python", "converters": "conv", "llama-imatrix": "imatrix", "llama-quantize": "quantize"}


def model(**changes: object) -> Model:
    facts = {"source": "models/tiny", "format": "safetensors", "numbers": "bf16", "hidden": 576, "feed_forward": 1536}
    return Model.model_validate(facts | changes)


def titles(scheme: str, **changes: object) -> list[str]:
    job = Job(
        model=model(**changes), scheme=scheme, folder="out", shared="base", samples="s.jsonl", plain="s.txt", jobs=2
    )
    return [step.title for step in quantizers.that_makes(scheme).steps(job, TOOLS)]


def test_a_gguf_is_converted_weighed_and_quantized() -> None:
    assert titles("q4_k_m") == ["convert to GGUF", "weigh each weight by the calibration text", "quantize to q4_k_m"]
    assert titles("q8_0") == ["convert to GGUF", "quantize to q8_0"]  # nothing to weigh
    assert titles("f16") == ["convert to GGUF"]
    assert titles("q4_0", format="gguf", numbers="f16") == titles("q4_0")[1:]


def test_the_file_is_named_for_model_and_scheme() -> None:
    job = Job(model=model(), scheme="q4_k_m", folder="out", shared="base", jobs=2)
    last = quantizers.that_makes("q4_k_m").steps(job, TOOLS)[-1]
    assert last.argv == ("quantize", "base/base.gguf", "out/tiny.Q4_K_M.gguf", "Q4_K_M", "2")


def test_groups_divide_the_rows_or_it_is_refused() -> None:
    assert llmcompressor.group_size(model()) == 64
    assert llmcompressor.group_size(model(hidden=4096, feed_forward=14336)) == 128
    with pytest.raises(InputError, match="rows of 570"):
        quantizers.that_makes("w4a16-gptq").check(model(hidden=570, feed_forward=None), "w4a16-gptq")


def test_what_is_quantized_already_is_not_quantized_again() -> None:
    with pytest.raises(InputError, match="quantized already"):
        quantizers.that_makes("q4_k_m").check(model(format="gguf", numbers="q4_1"), "q4_k_m")
    with pytest.raises(InputError, match="quantized already"):
        quantizers.that_makes("w8a8-int8").check(model(numbers="fp8"), "w8a8-int8")


def test_words_that_calibration_does_not_know_are_counted() -> None:
    assert quantize._known(["the cat sat"], ["The dog sat"]) == pytest.approx(2 / 3)


def test_an_unknown_scheme_gets_a_hint() -> None:
    with pytest.raises(InputError, match="Did you mean"):
        quantizers.that_makes("q4_k_n")


def test_every_scheme_that_can_be_made_is_in_the_catalogue() -> None:
    assert set(quantizers.schemes()) <= set(catalog.names("scheme"))


def test_the_catalogues_texts_take_turns_and_what_calibrates_does_not_judge() -> None:
    mixed = catalog.calibration_texts()
    assert len(mixed) >= 128 and "def " in mixed[1]
    judging = {"\n".join(one.get("turns") or [one["text"]]) for kind in catalog.CLASSES for one in catalog.texts(kind)}
    assert not judging & set(mixed)
