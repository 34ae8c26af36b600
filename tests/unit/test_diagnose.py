"""Recorded engine logs are diagnosed as typed failures, with the values in the log."""

from pathlib import Path

import pytest

from powerband import engines

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
CASES = {
    "vllm-tp": ("parallelism_refused", "2 does not divide the model's 9 attention heads"),
    "vllm-context": ("context_too_long", "100000 is above the model's context length of 8192 tokens"),
    "vllm-flag": ("unknown_flag", "--no-such-flag"),
    "vllm-fp8": ("unsupported", "no kernel static_scaled_fp8_quant"),
    "vllm-kvsmall": ("out_of_memory", "8192 tokens needs 0.18 GiB"),
    "vllm-memory": ("out_of_memory", "the KV cache of 60.0 GiB does not fit"),
    "vllm-lora": ("lora_broken", "lora_alpha"),
    "vllm-suffix": ("unsupported", "arctic-inference"),
    "vllm-eagle": ("wrong_format", "LlamaModel has no 'model'"),
    "vllm-mtp": ("unsupported", "speculative method mtp"),
    "vllm-lscpu": ("unsupported", "lscpu"),
    "vllm-batch": ("wrong_value", "max_num_batched_tokens (8) must be greater"),
    "vllm-block": ("crashed", "No common block size for 17"),
    "vllm-quant": ("wrong_value", "Cannot find the config file for awq"),
    "vllm-gpu-startup": ("out_of_memory", "0.9 of cuda:0 (19.84 GiB); 19.77 GiB"),
    "vllm-gpu-oom": ("out_of_memory", "tried to allocate another 350.00 MiB"),
    "llamacpp-flag": ("unknown_flag", "--no-such-flag"),
    "llamacpp-value": ("wrong_value", "--threads"),
    "llamacpp-fa": ("unsupported", "flash attention"),
    "llamacpp-memory": ("out_of_memory", "439453.12 MB"),
    "llamacpp-trunc": ("corrupt_file", "not within the file bounds"),
    "llamacpp-lora": ("lora_broken", "not a LoRA adapter"),
    "llamacpp-mtp": ("unsupported", "MTP layers"),
    "llamacpp-gpu-oom": ("out_of_memory", "out of memory on the device"),
    "sglang-flag": ("unknown_flag", "--enable-reasoning"),
    "sglang-memory": ("out_of_memory", "the weights leave no memory for the KV cache"),
    "sglang-memory-share": ("out_of_memory", "within mem_fraction_static 0.84"),
    "sglang-graphs": ("out_of_memory", "to capture CUDA graphs: SGLang tried to allocate another 448.00 MiB"),
    "sglang-tp": ("parallelism_refused", "over 6 GPUs does not divide the 16 heads"),
    "sglang-port": ("port_taken", "metrics_port 40290"),
    "sglang-kernels": ("unsupported", "need libnvrtc.so.12"),
    "sglang-context": ("context_too_long", "100000 is above the model's context length of 8192 tokens"),
    "sglang-capability": ("unsupported", "modelopt_fp8 needs compute capability 89; this GPU has 80"),
}
SILENT = {
    "llamacpp-eagle": ("lever_ignored", "draft model is not eagle3"),
    "llamacpp-draftless": ("lever_ignored", "draft-simple requires a draft context"),
    "llamacpp-context": ("lever_ignored", "capped the context of 100096 tokens at the model's 8192"),
}


def diagnose(case: str, *, ready: bool = False) -> tuple[str, str] | None:
    log = (LOGS / f"{case}.log").read_text()
    failure = engines.get(case.partition("-")[0]).diagnose(log, ready=ready)
    if failure is None:
        return None
    assert failure.hint and "{" not in failure.sentence + failure.hint
    assert failure.evidence and failure.evidence in log
    return failure.kind, failure.sentence


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_diagnosed(case: str) -> None:
    kind, message = CASES[case]
    found = diagnose(case)
    assert found is not None and found[0] == kind
    assert message in found[1]


@pytest.mark.parametrize("case", SILENT)
def test_a_silently_ignored_lever_is_diagnosed(case: str) -> None:
    kind, message = SILENT[case]
    found = diagnose(case, ready=True)
    assert found is not None and found[0] == kind
    assert message in found[1]


def test_every_log_is_used() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(CASES) | set(SILENT)
