"""The naive baseline: Hugging Face `generate` in bf16 with static batches, each as long as its longest answer.

Runs in an interpreter that has transformers. Reads JSON: requests (messages, answer tokens) and limits (share, seconds)
on the time until the complete answer. Prints the throughput when all requests arrive at once, and the goodput: the
highest arrival rate that meets the limits, 0 if none does.
"""

import json
import random
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_SIZE, SINGLE_REQUESTS = 8, 12
RATE_SHARES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1)  # of the throughput


class Naive:
    """A model that generates one batch after another."""

    def __init__(self, path: str, requests: list) -> None:
        self.requests = requests
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16).eval()
        chats = (chat for chat, _ in requests)
        self.texts = [
            self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
        ]

    def answer(self, begin: int, end: int) -> None:
        """Generate the answers of one batch."""
        batch = self.tokenizer(self.texts[begin:end], return_tensors="pt", padding=True, add_special_tokens=False)
        length = max(count for _, count in self.requests[begin:end])
        pad = self.tokenizer.pad_token_id
        with torch.inference_mode():
            self.model.generate(
                **batch, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=pad
            )

    def latencies(self, due: list[float]) -> list[float]:
        """Answer requests in batches as they arrive; return the latency of each."""
        began, done, found = time.monotonic(), 0, []
        while done < len(due):
            now = time.monotonic() - began
            arrived = min(sum(at <= now for at in due), done + BATCH_SIZE)
            if arrived == done:
                time.sleep(due[done] - now)
                continue
            self.answer(done, arrived)
            now = time.monotonic() - began
            found += [now - at for at in due[done:arrived]]
            done = arrived
        return found


def meets_limits(latencies: list[float], limits: list) -> bool:
    """Return whether the share of late answers is within every limit."""
    return all(sum(one > limit for one in latencies) <= (1 - share) * len(latencies) for share, limit in limits)


def goodput(naive: Naive, limits: list, throughput_per_s: float, rng: random.Random) -> float:
    """Return the highest arrival rate that meets the limits; 0 if none does."""
    single = [0.0] * min(SINGLE_REQUESTS, len(naive.requests))
    for number in range(len(single)):
        began = time.monotonic()
        naive.answer(number, number + 1)
        single[number] = time.monotonic() - began
        if not meets_limits(single, limits):
            return 0.0  # latency is lowest at concurrency 1
    for share in RATE_SHARES:
        due, at = [], 0.0
        for _ in naive.requests:
            at += rng.expovariate(share * throughput_per_s)
            due.append(at)
        if meets_limits(naive.latencies(due), limits):
            return share * throughput_per_s
    return 0.0


def main() -> None:
    """Measure throughput and goodput."""
    path, file = sys.argv[1:]
    with open(file) as stream:
        inputs = json.load(stream)
    requests, limits = inputs["requests"], inputs["limits"]
    naive = Naive(path, requests)
    naive.answer(0, BATCH_SIZE)  # warm-up
    latencies = naive.latencies([0.0] * len(requests))
    throughput_per_s = len(requests) / max(latencies)
    if meets_limits(latencies, limits):  # requests that arrive later wait no longer
        goodput_per_s = throughput_per_s
    else:
        goodput_per_s = goodput(naive, limits, throughput_per_s, random.Random(inputs["seed"]))
    print(json.dumps({"throughput_per_s": throughput_per_s, "goodput_per_s": goodput_per_s}))


main()
