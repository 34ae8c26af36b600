"""Run by vLLM's interpreter: GGUF to bf16 safetensors, and two LoRA adapters of random weights."""

import json
import shutil
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # type: ignore[import-not-found]

gguf, target, w8a8, root = map(Path, sys.argv[1:])
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(target)

# Eight-bit integers by rounding, a scale for each row, activations scaled as they come: the plainest W8A8 there is.
tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
for name, module in model.named_modules():
    if isinstance(module, torch.nn.Linear) and name != "lm_head":
        weight = module.weight.float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[f"{name}.weight"] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale
w8a8.mkdir(exist_ok=True)
save_file(tensors, w8a8 / "model.safetensors", metadata={"format": "pt"})
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    if (target / name).exists():
        shutil.copy(target / name, w8a8 / name)
integers = {"num_bits": 8, "type": "int", "symmetric": True}
config = json.loads((target / "config.json").read_text())
config["quantization_config"] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**integers, "strategy": "channel", "dynamic": False},
            "input_activations": {**integers, "strategy": "token", "dynamic": True},
        }
    },
}
(w8a8 / "config.json").write_text(json.dumps(config))

RANK = 8
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": str(target),
}
for number in (1, 2):
    torch.manual_seed(number)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            rows, columns = module.weight.shape
            key = f"base_model.model.{name}"
            weights[f"{key}.lora_A.weight"] = (torch.randn(RANK, columns) * 0.05).to(torch.bfloat16)
            weights[f"{key}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.05).to(torch.bfloat16)
    folder = root / f"lora-{number}"
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
