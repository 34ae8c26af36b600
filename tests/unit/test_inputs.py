"""Arguments of the command line and of Python: names, files, documents, prices, and the stages as functions."""

import asyncio
from typing import Any

import pytest

import powerband as pb
from powerband import inputs
from powerband.errors import InputError


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:1/", "http://127.0.0.1:1/v1"])
def test_a_server_url_may_end_with_v1(url: str) -> None:
    config: Any = inputs.deployment(url, engine=None).config
    assert config.base_url.rstrip("/") == "http://127.0.0.1:1"


def test_knobs_are_texts_or_a_mapping() -> None:
    texts = inputs.deployment("golden", engine="fake", settings=["ttft_s=100ms", "max_num_seqs=3"])
    mapping = inputs.deployment("golden", engine="fake", settings={"ttft_s": 0.1, "max_num_seqs": 3})
    assert texts == mapping
    again = inputs.deployment(texts, engine=None, settings={"max_num_seqs": 4})
    assert (again.config.ttft_s, again.config.max_num_seqs) == (0.1, 4)


def test_prices_have_one_form() -> None:
    assert inputs.Prices(2.5).get("l4") == 2.5
    both = inputs.Prices(["1.5", "h100=3"])
    assert (both.get("h100-sxm"), both.get("l4")) == (3.0, 1.5)
    assert inputs.price_here(["this-machine=0.2"]) == 0.2 and inputs.price_here(()) is None
    with pytest.raises(InputError, match="is not a price"):
        inputs.Prices("cheap")


def test_a_stage_is_a_function_in_scripts_and_in_notebooks() -> None:
    found = pb.plan("Qwen/Qwen3-8B", on="l4", engine="vllm", scheme="bf16", price=1.0)
    assert isinstance(found, pb.Plan) and found.candidates[0].usd_per_h == found.candidates[0].devices * 1.0

    async def cell() -> tuple[pb.Plan, pb.Plan]:
        arguments: dict[str, Any] = {"on": ["l4"], "engine": "vllm", "scheme": "bf16", "price": 1.0}
        return pb.plan("Qwen/Qwen3-8B", **arguments), await pb.aio.plan("Qwen/Qwen3-8B", **arguments)

    assert asyncio.run(cell()) == (found, found)


def test_an_error_reaches_the_caller_inside_a_running_loop() -> None:
    async def cell() -> None:
        with pytest.raises(InputError, match="no device 'h20O'"):
            pb.plan("Qwen/Qwen3-8B", on="h20O")

    asyncio.run(cell())


def test_documents_are_records_and_html() -> None:
    found = pb.plan("Qwen/Qwen3-8B", on="l4", engine="vllm", scheme="bf16")
    rows = found.to_records()
    assert len(rows) == len(found.candidates)
    assert rows[0]["goodput_per_s"] == found.candidates[0].goodput_per_s.value > rows[0]["goodput_per_s.low"]
    assert "<iframe" in found._repr_html_() and "Qwen" in found._repr_html_()
    assert "<pre>" in pb.SLO.model_validate({"ttft": {"p95": "1s"}})._repr_html_()
