"""A model's shape: its layers, their parameter counts, and what they store in the KV cache for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from powerband.core.document import Value


class Layers(Value):
    """Layers of one kind; sizes are element counts, not bytes."""

    count: int
    attention: int = Field(description="attention parameters of one layer")
    dense: int = Field(default=0, description="feed-forward parameters that every token uses")
    router: int = 0
    expert: int = Field(default=0, description="parameters of one routed expert")
    experts: int = 0
    active: int = Field(default=0, description="routed experts used per token")
    kv: int = Field(description="elements per token in the KV cache")
    window: int | None = Field(default=None, description="sliding window in tokens; None: full attention")
    state: int = Field(default=0, description="elements of fixed-size state per sequence")
    scores: int = Field(default=0, description="attention multiplications per pair of tokens")
    kv_heads: int = Field(default=1, description="KV heads: over how many devices the KV cache can be split")

    @property
    def parameters(self) -> int:
        """Return the parameters of one layer."""
        return self.attention + self.dense + self.router + self.expert * self.experts

    @property
    def active_parameters(self) -> int:
        """Return the parameters of one layer that a token uses."""
        return self.attention + self.dense + self.router + self.expert * self.active


class Shape(Value):
    """The sizes from which a model's bytes and operations are computed."""

    hidden: int
    vocabulary: int
    heads: int
    tied: bool = False
    layers: tuple[Layers, ...]
    mtp_parameters: int = Field(
        default=0, description="parameters of the multi-token prediction heads published with the model"
    )

    @property
    def depth(self) -> int:
        """Return the number of layers."""
        return sum(one.count for one in self.layers)

    @property
    def embedding(self) -> int:
        """Return the parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Return the parameters of the output embedding; 0 if it is tied to the input embedding."""
        return 0 if self.tied else self.embedding

    @property
    def parameters(self) -> int:
        """Return all parameters, without multi-token prediction heads."""
        norms = (2 * self.depth + 1) * self.hidden
        return self.embedding + self.head + norms + sum(one.count * one.parameters for one in self.layers)

    @property
    def active_parameters(self) -> int:
        """Return the parameters that a token uses; of the embeddings, only the output embedding counts."""
        return self.embedding + sum(one.count * one.active_parameters for one in self.layers)

    @property
    def experts(self) -> int:
        """Return the number of routed experts per layer; 0 for a dense model."""
        return max((one.experts for one in self.layers), default=0)

    def adapter_elements(self, rank: int, *, tensor: int = 1) -> float:
        """Return the elements of a LoRA adapter of all linear layers, on one of `tensor` devices.

        A matrix with `in` inputs and `out` outputs gets rank * (in + out) elements. Tensor parallelism splits only the
        sides that are not the hidden size.
        """
        found = 0.0
        for one in self.layers:
            dense = 3 * self.hidden + one.dense / self.hidden / tensor if one.dense else 0.0
            routed = one.experts * (3 * self.hidden + one.expert / self.hidden / tensor)
            found += one.count * (4 * self.hidden + one.attention / self.hidden / tensor + dense + routed)
        return rank * found

    def adapters_bytes(self, count: int, rank: int, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Return the bytes of LoRA adapters of this rank in 16 bits, on each device of a split."""
        return round(2 * count * self.adapter_elements(rank, tensor=tensor) / pipeline)

    def kv_elements(self, tokens: int = 1) -> int:
        """Return the KV-cache elements of a sequence of this many tokens."""
        return sum(one.count * one.kv * min(tokens, one.window or tokens) for one in self.layers)

    def state_elements(self) -> int:
        """Return the elements of fixed-size state per sequence."""
        return sum(one.count * one.state for one in self.layers)


def from_config_json(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape from a Hugging Face `config.json`; None if required keys are missing."""
    config = {**config, **config.get("text_config", {})}
    depth, hidden, heads = (config.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    vocabulary = config.get("vocab_size")
    if not (depth and hidden and heads and vocabulary):
        return None
    kinds = _attention_kinds(config, depth)
    layers = [_layer(config, number, kind) for number, kind in enumerate(kinds)]
    mtp_layers = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0
    # DeepSeek publishes a second copy of both embeddings with its prediction head.
    embeddings = 2 * vocabulary * hidden if config.get("kv_lora_rank") else 0
    return Shape(
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        tied=config.get("tie_word_embeddings", config.get("model_type", "").startswith("gemma")),
        layers=_grouped(layers),
        mtp_parameters=mtp_layers * (layers[-1].parameters + 2 * hidden * hidden + embeddings),
    )


def _attention_kinds(config: Mapping[str, Any], depth: int) -> list[str]:
    if kinds := config.get("layer_types"):
        return [str(kind) for kind in kinds]
    if (pattern := config.get("sliding_window_pattern")) and config.get("sliding_window"):
        return ["full_attention" if (number + 1) % pattern == 0 else "sliding_attention" for number in range(depth)]
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if window else "full_attention"] * depth


def _layer(config: Mapping[str, Any], number: int, kind: str) -> Layers:
    attention = _linear(config) if kind.startswith("linear") else _latent(config) or _grouped_query(config, kind)
    return Layers(count=1, **attention, **_feed_forward(config, number))


def _grouped_query(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the sizes of multi-head or grouped-query attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    full = kind.startswith("full")
    dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if full and config.get("global_head_dim"):
        dim, kv_heads = config["global_head_dim"], config.get("num_global_key_value_heads") or kv_heads
    values = 1 if full and config.get("attention_k_eq_v") else 2  # shared keys and values have one projection
    gate = 1 if config.get("attn_output_gate") or config.get("full_attention_interval") else 0
    bias = dim * (heads + values * kv_heads) + hidden if config.get("attention_bias") else 0
    return {
        "attention": hidden * dim * (heads * (2 + gate) + values * kv_heads) + bias,
        "kv": 2 * kv_heads * dim,
        "window": None if full else config.get("sliding_window"),
        "scores": 2 * heads * dim,
        "kv_heads": kv_heads,
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the sizes of multi-head latent attention (MLA), which caches one compressed vector for all heads."""
    rank = config.get("kv_lora_rank")
    if not rank:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = config.get("q_lora_rank")
    query = hidden * queries + queries * heads * (nope + rope) if queries else hidden * heads * (nope + rope)
    key_value = hidden * (rank + rope) + rank * heads * (nope + value)
    index = 0
    if config.get("index_topk"):  # sparse attention: an indexer selects the tokens to attend to
        index = (queries or hidden) * config["index_n_heads"] * config["index_head_dim"]
        index += hidden * (config["index_head_dim"] + config["index_n_heads"])
    return {
        "attention": query + key_value + heads * value * hidden + index,
        "kv": rank + rope + (config.get("index_head_dim", 0) if index else 0),
        "scores": heads * (2 * rank + rope),
    }


def _linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of linear attention, which keeps a fixed-size state instead of a KV cache."""
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    kernel = config.get("linear_conv_kernel_dim", 4)
    return {
        "attention": hidden * (2 * keys + 3 * values + 2 * config["linear_num_value_heads"])
        + kernel * (2 * keys + values),
        "kv": 0,
        "state": config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"]
        + (kernel - 1) * (2 * keys + values),
    }


def _feed_forward(config: Mapping[str, Any], number: int) -> dict[str, Any]:
    hidden, inner = config["hidden_size"], config.get("intermediate_size") or 0
    experts = _first(config, "num_local_experts", "n_routed_experts", "num_experts")
    dense_layer = number < (config.get("first_k_dense_replace") or 0)
    step = config.get("moe_layer_freq") or config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step")
    dense_layer = dense_layer or bool(step and (number + 1) % step)
    if not experts or dense_layer:
        return {"dense": 3 * hidden * (config.get("intermediate_size_mlp") or inner)}
    each = config.get("moe_intermediate_size") or inner
    shared = each * (config.get("n_shared_experts") or 0) + (config.get("shared_expert_intermediate_size") or 0)
    if config.get("model_type") == "llama4_text":
        shared = each
    if config.get("enable_moe_block"):  # Gemma adds a dense feed-forward block to the experts
        shared += inner
    bias = (2 * each + hidden) if config.get("model_type") == "gpt_oss" else 0
    return {
        "dense": 3 * hidden * shared,
        "router": hidden * experts,
        "expert": 3 * hidden * each + bias,
        "experts": experts,
        "active": _first(config, "num_experts_per_tok", "experts_per_token", "top_k_experts") or 1,
    }


def from_gguf(header: Mapping[str, Any]) -> Shape | None:
    """Return the shape from a GGUF header, by mapping its keys to those of a `config.json`."""
    architecture = header.get("general.architecture", "")

    def fact(name: str) -> Any:
        value = header.get(f"{architecture}.{name}")
        return max(value) if isinstance(value, list) and value else value  # per-layer lists: the widest layer

    config = {
        "num_hidden_layers": fact("block_count"),
        "hidden_size": fact("embedding_length"),
        "num_attention_heads": fact("attention.head_count"),
        "num_key_value_heads": fact("attention.head_count_kv"),
        "head_dim": fact("attention.key_length"),
        "intermediate_size": fact("feed_forward_length"),
        "vocab_size": fact("vocab_size") or header.get("tokenizer.ggml.tokens.length"),
        "sliding_window": fact("attention.sliding_window"),
        "num_experts": fact("expert_count"),
        "num_experts_per_tok": fact("expert_used_count"),
        "moe_intermediate_size": fact("expert_feed_forward_length"),
        "n_shared_experts": fact("expert_shared_count"),
        "shared_expert_intermediate_size": fact("expert_shared_feed_forward_length"),
        "first_k_dense_replace": fact("leading_dense_block_count"),
        "kv_lora_rank": fact("attention.kv_lora_rank"),
        "q_lora_rank": fact("attention.q_lora_rank"),
        "tie_word_embeddings": header.get("tied", False),
    }
    if config["kv_lora_rank"]:
        rope = fact("rope.dimension_count") or 64
        whole = fact("attention.key_length_mla") or fact("attention.key_length")
        value = fact("attention.value_length_mla") or fact("attention.value_length")
        config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": whole - rope, "v_head_dim": value}
    if architecture == "gpt-oss":  # every other layer uses a sliding window
        config |= {"model_type": "gpt_oss", "attention_bias": True}
        config["layer_types"] = ["sliding_attention", "full_attention"] * ((config["num_hidden_layers"] or 0) // 2)
    return from_config_json({key: value for key, value in config.items() if value is not None})


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if (value := config.get(name))), 0)


def _grouped(layers: Sequence[Layers]) -> tuple[Layers, ...]:
    """Merge equal layers into one entry with their count."""
    counts: dict[Layers, int] = {}
    for one in layers:
        counts[one] = counts.get(one, 0) + 1
    return tuple(one.model_copy(update={"count": count}) for one, count in counts.items())
