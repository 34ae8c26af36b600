"""A model: published weights, and the architecture read from `config.json` or a GGUF header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from powerband.core import hub_id
from powerband.core import shape as shapes
from powerband.core.document import Value
from powerband.core.shape import Shape
from powerband.errors import InputError

Format = Literal["safetensors", "gguf"]
_MAX_LAYERS = 10_000
_MAX_NUMBER = 2**63
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Model(Value):
    """A model's architecture as its files state it; None where they do not."""

    source: str
    format: Format | None = None
    architecture: str | None = None
    layers: int | None = None
    hidden: int | None = None
    feed_forward: int | None = Field(default=None, description="hidden size of a dense feed-forward layer or an expert")
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    context_tokens: int | None = None
    experts: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    weight_format: str | None = Field(default=None, description="format of the weights, as in a scheme's published_as")
    weight_bytes: int | None = None
    shape: Shape | None = None

    @property
    def name(self) -> str:
        """Return the last component of its source, without a revision and `.gguf`."""
        return hub_id.model_name(self.source)

    def kv_elements_per_token(self) -> int | None:
        """Return the elements per token in the KV cache."""
        if self.shape:
            return self.shape.kv_elements()
        if self.layers and self.kv_heads and self.head_dim:  # assumes full attention in every layer
            return 2 * self.layers * self.kv_heads * self.head_dim
        return None


def from_config_json(config: Mapping[str, Any], *, source: str, weight_bytes: int | None) -> Model:
    """Return the model from a Hugging Face `config.json`; multimodal models have their keys under `text_config`.

    Raise InputError if a value is not of the kind that the key needs, or is impossible.
    """
    try:
        return _checked(_from_config_json(config, source=source, weight_bytes=weight_bytes))
    except _MALFORMED as error:
        raise _not_a_model(source, "config.json", error) from None


def _from_config_json(config: Mapping[str, Any], *, source: str, weight_bytes: int | None) -> Model:
    config = {**config, **config.get("text_config", {})}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    architectures = config.get("architectures") or [None]
    _check_depth(config.get("num_hidden_layers"), config.get("layer_types"))
    return Model(
        source=source,
        format="safetensors",
        architecture=architectures[0],
        layers=config.get("num_hidden_layers"),
        hidden=hidden,
        feed_forward=config.get("moe_intermediate_size") or config.get("intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (hidden // heads if hidden and heads else None),
        vocabulary=config.get("vocab_size"),
        context_tokens=config.get("max_position_embeddings"),
        experts=config.get("num_local_experts") or config.get("n_routed_experts") or config.get("num_experts"),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        quantization=(config.get("quantization_config") or {}).get("quant_method"),
        weight_bytes=weight_bytes,
        weight_format=_weight_format(config),
        shape=shapes.from_config_json(config),
    )


def _weight_format(config: Mapping[str, Any]) -> str:
    """Return the format of the weights; some quantizers produce several, so their name alone is not enough."""
    quantized = config.get("quantization_config") or {}
    method = str(quantized.get("quant_method") or "bf16")
    if method == "compressed-tensors":
        groups: list[dict[str, Any]] = list((quantized.get("config_groups") or {}).values())
        weights = groups[0].get("weights") or {} if groups else {}
        return f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"
    return str(quantized.get("quant_algo", method)).lower() if method == "modelopt" else method


def from_gguf(header: Mapping[str, Any], *, source: str, weight_bytes: int) -> Model:
    """Return the model from a GGUF header's key-value pairs; raise InputError as `from_config_json` does."""
    try:
        return _checked(_from_gguf(header, source=source, weight_bytes=weight_bytes))
    except _MALFORMED as error:
        raise _not_a_model(source, "GGUF header", error) from None


def _check_depth(layers: Any, kinds: Any = None) -> None:
    """Raise ValueError for a number of layers that no model has, before there is an object for each."""
    if (isinstance(layers, int) and layers > _MAX_LAYERS) or (isinstance(kinds, list) and len(kinds) > _MAX_LAYERS):
        raise ValueError(f"more than {_MAX_LAYERS:,} layers")


def _checked(model: Model) -> Model:
    """Return the model; raise ValueError if one of its numbers is negative or impossibly large."""
    layers = model.shape.layers if model.shape else ()
    for part in (model, *([model.shape] if model.shape else []), *layers):
        for name, value in part:
            if isinstance(value, int) and not 0 <= value <= _MAX_NUMBER:
                raise ValueError(f"{name} would be {'negative' if value < 0 else 'over 2^63'}")
    return model


def _not_a_model(source: str, what: str, error: Exception) -> InputError:
    reason = (
        "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()[:3] if one["loc"])
        if isinstance(error, ValidationError)
        else f"{type(error).__name__}: {error}"
    )
    return InputError(f"the {what} of {source} does not describe a model ({reason})"[:500], hint="download it again")


def _from_gguf(header: Mapping[str, Any], *, source: str, weight_bytes: int) -> Model:
    architecture = header.get("general.architecture")

    def fact(name: str) -> Any:
        value = header.get(f"{architecture}.{name}")
        return max(value) if isinstance(value, list) and value else value  # per-layer lists: the widest layer

    heads, hidden = fact("attention.head_count"), fact("embedding_length")
    _check_depth(fact("block_count"))
    return Model(
        source=source,
        format="gguf",
        architecture=architecture,
        layers=fact("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=fact("attention.head_count_kv") or heads,
        head_dim=fact("attention.key_length") or (hidden // heads if hidden and heads else None),
        vocabulary=fact("vocab_size") or header.get("tokenizer.ggml.tokens.length"),
        context_tokens=fact("context_length"),
        experts=fact("expert_count"),
        quantization=_GGUF_FILE_TYPES.get(header.get("general.file_type", -1)),
        weight_bytes=weight_bytes,
        weight_format=_GGUF_FILE_TYPES.get(header.get("general.file_type", -1), "f16"),
        shape=shapes.from_gguf(header),
    )


# llama.cpp's `llama_ftype`, by number.
_GGUF_FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s",
    12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k",
    19: "iq2_xxs", 20: "iq2_xs", 21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl",
    26: "iq3_s", 27: "iq3_m", 28: "iq2_s", 29: "iq2_m", 30: "iq4_xs", 31: "iq1_m", 32: "bf16",
}  # fmt: skip
