"""Faults that only a real engine has: a warm prefix cache, and a KV cache that is too small."""

from __future__ import annotations

from support.engines import started
from support.faults import CHAT, Outcome, bench

LONG = """\
powerband: workload/1
arrivals: {process: poisson, rate_per_s: 6}
prompt: {shape: fixed, tokens: 300}
output: {shape: fixed, tokens: 400}
"""


async def same_traffic_twice() -> Outcome:
    """The same seed twice against one vLLM: its prefix cache knows every prompt."""
    workload = CHAT.replace("40}", "2}").replace("tokens: 24", "tokens: 600").replace("tokens: 16", "tokens: 4")
    async with started("vllm", max_num_seqs=8) as server:
        for _ in range(2):
            outcome = bench(server.replica.url, "--requests", "12", workload=workload)
        return outcome


async def tiny_kv_cache() -> Outcome:
    """Answers of 700 tokens, and a KV cache for a few of them: vLLM throws requests out and computes them again."""
    async with started("vllm", max_num_seqs=16, kv_cache_memory_bytes="96MiB", max_model_len=1024) as server:
        return bench(server.replica.url, "--users", "12", "--duration", "15s", workload=LONG)


FAULTS = {"repeated prompts, cache-warm": same_traffic_twice, "preemptions": tiny_kv_cache}
