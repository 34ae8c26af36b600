"""The naive way to serve: Hugging Face `generate` in bf16, requests in static batches, each as long as its longest.

Run by an interpreter that has transformers. Reads a JSON list of [messages, answer tokens], prints requests per second.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 8


def main() -> None:
    """Answer every request, as quickly as static batches allow; nobody waits for an arrival."""
    model_path, file = sys.argv[1:]
    with open(file) as stream:
        asked = json.load(stream)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype=torch.bfloat16).eval()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat, _ in asked]

    def answer(begin: int) -> None:
        batch = tokenizer(texts[begin : begin + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        most = max(count for _, count in asked[begin : begin + BATCH])
        with torch.inference_mode():
            model.generate(
                **batch, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )

    answer(0)  # warm
    began = time.monotonic()
    for begin in range(0, len(asked), BATCH):
        answer(begin)
    print(json.dumps({"requests_per_s": len(asked) / (time.monotonic() - began)}))


main()
