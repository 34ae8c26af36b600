"""Diagnoses of recorded servers, and what an observation says of two pages."""

from __future__ import annotations

import pytest

from powerband.core.diagnosis import Diagnosis
from powerband.core.slo import SLO
from powerband.diagnose.collect import Reading, Readings, command_words, parse_slots
from powerband.diagnose.observation import observe, quantile, share_within
from powerband.engines import live
from powerband.engines.live import Histogram
from powerband.errors import InputError
from powerband.reports import diagnosis as report
from support.recorded import Case, cases

UNSEEN = {"vllm-gpu-needs-reset"}  # its cause is in no reading


@pytest.mark.parametrize("case", cases(), ids=lambda one: one.name)
def test_a_public_case(case: Case) -> None:
    found = case.diagnosis()
    named = [one.rule for one in found.findings]
    if case.expected and case.name not in UNSEEN:
        assert set(named[:2]) & set(case.expected), named
    else:
        assert [one.rule for one in found.findings if one.severity != "note"] == []
    assert Diagnosis.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize("case", cases(), ids=lambda one: one.name)
def test_every_finding_can_be_shown(case: Case) -> None:
    found = case.diagnosis()
    page = report.html(found)
    for one in found.findings:
        for text in (one.why, one.risk, one.docs, one.change.short):
            assert text, one.rule
        assert one.docs in page
        assert one.effect.factor is not None or one.effect.basis


PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_running{{engine="1"}} 1
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 2
vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} 1
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} 0.75
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {tokens}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_cache_hit"}} {cached}
vllm:cache_config_info{{block_size="16",cache_dtype="auto",enable_prefix_caching="False",num_gpu_blocks="100"}} 1
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="1.0"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {all}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {sum}
vllm:time_to_first_token_seconds_count{{engine="0"}} {all}
"""


def test_an_observation_is_of_the_window_only() -> None:
    found = Readings(url="", engine="vllm")
    first = PAGE.format(running=3, tokens=1000, cached=500, fast=10, all=100, sum=900)
    last = PAGE.format(running=5, tokens=1600, cached=700, fast=20, all=120, sum=915)
    found.readings = [Reading(0.0, live.read_page("vllm", first)), Reading(10.0, live.read_page("vllm", last))]
    one = observe(found, SLO(ttft={"p95": 0.5}))
    assert one.running == 5.0  # (3 + 1 + 5 + 1) / 2: over both engines
    assert one.kv_use_max == 0.75
    assert one.deferred_max == 1
    assert one.output_tokens_per_s == 60
    assert one.cached_share == pytest.approx(200 / 800)
    assert one.ttft_s == pytest.approx(15 / 20)
    assert one.slo_ttft_share == pytest.approx(10 / 20)
    assert one.settings["enable_prefix_caching"] is False
    assert one.kv_tokens == 1600


def test_a_restart_of_the_server_counts_from_zero() -> None:
    found = Readings(url="", engine="vllm")
    for at_s, tokens in ((0.0, 1000), (5.0, 1100), (10.0, 40)):
        page = live.read_page("vllm", f"vllm:generation_tokens_total {tokens}\n")
        found.readings.append(Reading(at_s, page))
    assert observe(found, None).output_tokens_per_s == pytest.approx(14)


def test_quantiles_are_interpolated() -> None:
    histogram = Histogram((1.0, 2.0, float("inf")), (10.0, 90.0, 100.0), 150.0, 100.0)
    assert quantile(histogram, 0.5) == pytest.approx(1.5)
    assert quantile(histogram, 0.99) == 2.0  # beyond the last bound
    assert share_within(histogram, 1.5) == pytest.approx(0.5)
    assert quantile(Histogram((1.0,), (2.0,), 1.0, 2.0), 0.5) is None  # too few


def test_prompts_of_a_debugging_server_are_dropped() -> None:
    shown = [{"id": 0, "n_ctx": 512, "is_processing": True, "n_prompt_tokens": 9, "prompt": "a secret",
              "next_token": [{"n_decoded": 4}], "id_task": 7}]  # fmt: skip
    slots = parse_slots(shown)
    assert slots[0].decoded == 4
    assert "secret" not in repr(slots)


def test_keys_are_redacted() -> None:
    words = ["vllm", "serve", "m", "--api-key", "abc", "--hf-token=def", "--max-num-batched-tokens", "512"]
    shown = live.redacted(words)
    assert "abc" not in shown
    assert "def" not in shown
    assert "512" in shown


LINES: list[tuple[str, str, dict[str, object]]] = [
    (
        "vllm",
        "vllm serve org/m --max_num_seqs=8 -tp 2 --enforce-eager",
        {"max_num_seqs": 8, "tensor_parallel_size": 2, "enforce_eager": True},
    ),
    (
        "vllm",
        "python -m vllm.entrypoints.openai.api_server --model m --no-enable-prefix-caching",
        {"enable_prefix_caching": False},
    ),
    (
        "llamacpp",
        "llama-server -m m.gguf -c 4096 -np 2 -no-kvu --no-op-offload -nkvo",
        {"ctx_size": 4096, "parallel": 2, "kv_unified": False, "op_offload": False, "kv_offload": False},
    ),
    (
        "llamacpp",
        "LLAMA_ARG_THREADS=3 llama-server -m m.gguf -fa off --some-flag x",
        {"threads": 3, "flash_attn": "off"},
    ),
]


@pytest.mark.parametrize(("engine", "line", "expected"), LINES)
def test_command_lines(engine: str, line: str, expected: dict[str, object]) -> None:
    argv, environment = command_words(line)
    found = live.read_command(engine, argv, environment)
    assert found.settings == expected
    assert found.model in ("org/m", "m", "m.gguf")


def test_a_changed_command_line_replaces_aliases() -> None:
    from powerband.diagnose.command_line import changed

    argv = ("llama-server", "-m", "m.gguf", "-np", "2", "--no-cont-batching", "--port", "80")
    line = changed("llamacpp", argv, {"parallel": 8}, ["cont_batching"])
    assert line == "llama-server -m m.gguf --port 80 --parallel 8"
    line = changed("vllm", ("vllm", "serve", "m"), {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "enable_lora": False}, [])
    assert line == "VLLM_CPU_OMP_THREADS_BIND=0-3 vllm serve m --no-enable-lora"


def test_a_command_that_cannot_be_parsed() -> None:
    with pytest.raises(InputError, match="--command"):
        command_words("vllm serve 'm")


def test_long_commands_are_broken_between_flags() -> None:
    words = " ".join(f"--option-{number} value-{number}" for number in range(8))
    lines = report.broken(f"vllm serve model {words}").splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 80 for line in lines)
    assert all(line.endswith("\\") for line in lines[:-1])
