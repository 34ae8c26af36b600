"""`bench` on real engines: the engine's word beside the client's; proofs/bench-guards has the guards that need one."""

from pathlib import Path

import pytest

from support import faults, models

pytestmark = pytest.mark.quiet

SHORT = """\
powerband: workload/1
name: short
arrivals: {process: poisson, rate_per_s: 2}
prompt: {shape: uniform, low: 20, high: 60}
output: {shape: uniform, low: 8, high: 24}
prefix: {tokens: 40}
"""
SLO = "powerband: slo/1\nttft: {p50: 30s}\n"  # answers, not speed: the CPU may be any


ENVIRONMENT = {"background load", "client", "steady state"}  # a shared machine may be busy


def measure(*words: str) -> None:
    """Hold a small load; the engine's count of tokens is the client's."""
    outcome = faults.bench(*words, "--rate", "1", "--requests", "16", "--force", workload=SHORT, slo=SLO)
    assert outcome.failed_guards <= ENVIRONMENT, outcome.stderr
    (level,) = outcome.measurement["levels"]
    assert level["requests"] >= 16 and level["attainment"]["value"] >= 0.5
    assert outcome.measurement["startup_s"] > 0.3
    (tokens,) = [one for one in level["crosschecks"] if one["what"] == "output tokens"]
    assert tokens["client"] == pytest.approx(tokens["engine"], rel=0.05)
    assert "the model's tokenizer" in outcome.measurement["provenance"]["tokens_by"]


@pytest.mark.llamacpp
def test_llamacpp_is_measured() -> None:
    measure(str(models.smollm2().gguf), "--set", "ctx_size=4096", "--set", "parallel=4", "--set", "cache_ram=0")


@pytest.mark.vllm
def test_vllm_is_measured() -> None:
    knobs = [
        "enforce_eager=true",
        "max_model_len=1024",
        "kv_cache_memory_bytes=512MiB",
        "VLLM_CPU_OMP_THREADS_BIND=0-1",
    ]
    words = [word for knob in knobs for word in ("--set", knob)]
    measure(str(models.smollm2().safetensors), "--engine", "vllm", *words)


@pytest.mark.llamacpp
def test_llamacpp_and_the_client_agree_on_the_first_token(tmp_path: Path) -> None:
    outcome = faults.bench(
        str(models.smollm2().gguf), "--set", "ctx_size=4096", "--users", "1", "--duration", "10s", workload=SHORT
    )
    (ttft,) = [one for one in outcome.measurement["levels"][0]["crosschecks"] if "TTFT" in one["what"]]
    assert ttft["client"] == pytest.approx(ttft["engine"], rel=0.10), "a shared machine; the proof holds it to 3 %"
