"""Quantize one model to one scheme; runs in LLM Compressor's interpreter, with calibration text from a file."""

import json
import shutil
import sys
from pathlib import Path

from datasets import Dataset  # type: ignore[import-not-found]
from llmcompressor import oneshot  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

MAX_TOKENS = 512  # of a calibration text
source, folder, scheme, samples, group, *ignored = sys.argv[1:]


def recipe() -> list[object]:
    """Return the modifiers of a scheme."""
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    common = {"ignore": ignored}
    four_bits = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": int(group)}
    groups = {"group_0": {"targets": ["Linear"], "weights": four_bits}}
    if scheme == "w8a8-int8":
        from llmcompressor.modifiers.transform.smoothquant import (  # type: ignore[import-not-found]
            SmoothQuantModifier,
        )

        smooth = SmoothQuantModifier(smoothing_strength=0.8)
        return [smooth, GPTQModifier(targets="Linear", scheme="W8A8", **common)]
    if scheme == "w4a16-gptq":
        return [GPTQModifier(config_groups=groups, **common)]
    if scheme == "w4a16-awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier  # type: ignore[import-not-found]

        return [AWQModifier(), QuantizationModifier(config_groups=groups, **common)]
    return [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", **common)]


model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
options: dict[str, object] = {}
if samples:
    texts = [json.loads(line)["text"] for line in Path(samples).read_text().splitlines()]
    rows = [tokenizer(text, truncation=True, max_length=MAX_TOKENS) for text in texts]
    rows = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in rows]
    options = {
        "dataset": Dataset.from_list(rows),
        "num_calibration_samples": len(rows),
        "max_seq_length": MAX_TOKENS,
    }
oneshot(model=model, recipe=recipe(), **options)
model.save_pretrained(folder, save_compressed=True)
tokenizer.save_pretrained(folder)
for extra in ("chat_template.jinja", "generation_config.json"):
    if (Path(source) / extra).exists() and not (Path(folder) / extra).exists():
        shutil.copy(Path(source) / extra, Path(folder) / extra)
