"""The `config.json` of public models, for hosts of the lab: the figures are those of the models' own files."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 28672,
}  # fmt: skip
