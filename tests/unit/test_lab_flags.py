"""The lab's stand-ins parse command lines as the engines do: the same values, refusals and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from powerband import engines
from powerband.engines import knobs
from powerband.testing.lab import flags

VLLM = flags.recorded("vllm", "0.32.0")
LLAMA = flags.recorded("llamacpp", "0.3.36")


def vllm(*argv: str) -> dict[str, Any]:
    return flags.vllm_arguments(argv, VLLM.options)


def llama(*argv: str, environment: Mapping[str, str] | None = None) -> dict[str, bool | str]:
    return flags.llama_arguments(argv, LLAMA.options, environment or {})


@pytest.mark.parametrize("recorded", [VLLM, LLAMA, flags.recorded("sglang", "0.5.23")], ids=lambda one: one.engine)
def test_every_knob_is_an_option_of_the_recorded_version(recorded: flags.Recorded) -> None:
    known = {name for one in recorded.options for name in (*one.names, *one.off)}
    assert knobs.flags(engines.get(recorded.engine).config_type) - known <= set()


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["m", "--max-model-len", "2k"], {"model": "m", "max_model_len": 2000}),
        (["m", "--max_model_len=2K"], {"model": "m", "max_model_len": 2048}),
        (["m", "--max-model-len", "auto"], {"model": "m", "max_model_len": -1}),
        (["--model", "m", "-tp", "2"], {"model": "m", "tensor_parallel_size": 2}),
        (["-tp", "2", "--model=m"], {"model": "m", "tensor_parallel_size": 2}),
        (["m", "--no-enable-prefix-caching"], {"model": "m", "enable_prefix_caching": False}),
        (["m", "--max-num-batched-tok", "512"], {"model": "m", "max_num_batched_tokens": 512}),
        (["m", "-O3"], {"model": "m", "optimization_level": "3"}),
        (["m", "--kv-cache-memory-bytes", "None"], {"model": "m", "kv_cache_memory_bytes": None}),
        (
            ["m", "--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=3"],
            {"model": "m", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            ["m", "--compilation-config.cudagraph_capture_sizes+", "1,2", "--enforce-eager"],
            {"model": "m", "enforce_eager": True, "compilation_config": {"cudagraph_capture_sizes": ["1", "2"]}},
        ),
        (["m", "--served-model-name", "a", "b"], {"model": "m", "served_model_name": ["a", "b"]}),
    ],
)
def test_vllm_reads_values(argv: list[str], wanted: dict[str, Any]) -> None:
    assert vllm(*argv) == wanted


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "--no-such-flag"], "vllm: error: unrecognized arguments: --no-such-flag"),
        (["m", "--max-num-seqs", "abc"], "error: argument --max-num-seqs: invalid int value: 'abc'"),
        (["m", "--dtype", "int3"], "error: argument --dtype: invalid choice: 'int3'"),
        (["m", "--max-num", "8"], "error: ambiguous option: --max-num could match"),
        (["m", "--max-num-batched-tokens", "1.5K"], "Decimals are not allowed"),
        (["m", "--speculative-config", "{broken"], "Value {broken cannot be converted"),
        (["m", "--compilation-config", '{"no_such_key": 1}'], "no_such_key"),
        (["m", "--max-num-seqs"], "expected one argument"),
    ],
)
def test_vllm_refuses(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        vllm(*argv)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith("usage: vllm") and words in said


def test_vllm_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm("--help=all")
    said = capsys.readouterr().out
    assert all(name in said for one in VLLM.options for name in one.names)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["-c", "2048", "-np", "4"], {"ctx_size": "2048", "parallel": "4"}),
        (["--ctx_size", "2048"], {"ctx_size": "2048"}),
        (["-t", "2x"], {"threads": "2x"}),
        (["-ngl", "all"], {"n_gpu_layers": "all"}),
        (["-nocb", "--metrics"], {"cont_batching": False, "metrics": True}),
        (["--spec-type", "ngram-simple,ngram-mod"], {"spec_type": "ngram-simple,ngram-mod"}),
        (["-ctk", "q8_0"], {"cache_type_k": "q8_0"}),
    ],
)
def test_llama_server_reads_values(argv: list[str], wanted: dict[str, Any]) -> None:
    assert llama(*argv) == wanted


def test_llama_server_reads_the_environment_first() -> None:
    environment = {"LLAMA_ARG_CTX_SIZE": "1024", "LLAMA_ARG_ENDPOINT_METRICS": "1"}
    assert llama("-c", "2048", environment=environment) == {"ctx_size": "2048", "metrics": True}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--no-such-flag"], "error: invalid argument: --no-such-flag"),
        (["--ctx"], "error: invalid argument: --ctx"),
        (["-c=2048"], "error: invalid argument: -c=2048"),
        (["-t", "abc"], 'error while handling argument "-t": stoi'),
        (["-c"], 'error while handling argument "-c": expected value for argument'),
        (["-c", "99999999999"], 'error while handling argument "-c": stoi'),
        (["-ctk", "int8"], 'error while handling argument "-ctk": Unsupported cache type: int8'),
        (["--spec-type", "ngram-simple,eagle9"], 'error while handling argument "--spec-type": '),
        (["--draft-max", "4"], 'error while handling argument "--draft-max": '),
    ],
)
def test_llama_server_refuses(argv: list[str], words: str) -> None:
    with pytest.raises(flags.WrongArgument) as caught:
        llama(*argv)
    assert str(caught.value).startswith(words)


def test_llama_server_refuses_a_wrong_environment() -> None:
    with pytest.raises(flags.WrongArgument, match='environment variable "LLAMA_ARG_THREADS": stoi'):
        llama(environment={"LLAMA_ARG_THREADS": "abc"})
