"""The naive way to serve: Hugging Face `generate` in bf16, requests in static batches, each as long as its longest.

Run by an interpreter that has transformers. Reads JSON: requests (messages, answer tokens) and limits (share, seconds)
on the time until an answer is there, which is all of it at once. Prints what it answers in a second when all requests
are there from the beginning, and the highest rate of arrivals at which it keeps the limits; 0 where it keeps them at none.
"""

import json
import random
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH, ALONE = 8, 12
SHARES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1)  # of what it can answer


class Naive:
    """A model that answers one batch after another."""

    def __init__(self, path: str, asked: list) -> None:
        self.asked = asked
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16).eval()
        chats = (chat for chat, _ in asked)
        self.texts = [
            self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
        ]

    def answer(self, begin: int, end: int) -> None:
        """Answer a batch."""
        batch = self.tokenizer(self.texts[begin:end], return_tensors="pt", padding=True, add_special_tokens=False)
        most = max(count for _, count in self.asked[begin:end])
        pad = self.tokenizer.pad_token_id
        with torch.inference_mode():
            self.model.generate(**batch, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=pad)

    def latencies(self, due: list[float]) -> list[float]:
        """Answer whoever is there, as many at once as fit into a batch, and return how long each waited."""
        began, done, found = time.monotonic(), 0, []
        while done < len(due):
            now = time.monotonic() - began
            there = min(sum(at <= now for at in due), done + BATCH)
            if there == done:
                time.sleep(due[done] - now)
                continue
            self.answer(done, there)
            now = time.monotonic() - began
            found += [now - at for at in due[done:there]]
            done = there
        return found


def kept(latencies: list[float], limits: list) -> bool:
    """Tell whether no more are late than may be."""
    return all(sum(one > limit for one in latencies) <= (1 - share) * len(latencies) for share, limit in limits)


def in_time(naive: Naive, limits: list, most_per_s: float, lot: random.Random) -> float:
    """Return the highest rate of arrivals at which the limits are kept."""
    alone = [0.0] * min(ALONE, len(naive.asked))
    for number in range(len(alone)):
        began = time.monotonic()
        naive.answer(number, number + 1)
        alone[number] = time.monotonic() - began
        if not kept(alone, limits):
            return 0.0  # nobody is answered sooner than alone
    for share in SHARES:
        due, at = [], 0.0
        for _ in naive.asked:
            at += lot.expovariate(share * most_per_s)
            due.append(at)
        if kept(naive.latencies(due), limits):
            return share * most_per_s
    return 0.0


def main() -> None:
    """Measure what it answers, and what it answers in time."""
    path, file = sys.argv[1:]
    with open(file) as stream:
        given = json.load(stream)
    asked, limits = given["asked"], given["limits"]
    naive = Naive(path, asked)
    naive.answer(0, BATCH)  # warm
    waited = naive.latencies([0.0] * len(asked))
    most_per_s = len(asked) / max(waited)
    if kept(waited, limits):  # those who come later wait no longer
        good_per_s = most_per_s
    else:
        good_per_s = in_time(naive, limits, most_per_s, random.Random(given["seed"]))
    print(json.dumps({"most_per_s": most_per_s, "good_per_s": good_per_s}))


main()
